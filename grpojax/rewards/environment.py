"""The reward `environment`: an environment's rewards of all turns, summed."""

from typing import Any


def environment(
  prompt: str, completion: str, example: dict[str, Any]
) -> dict[str, float] | None:
  """Returns the trajectory's return and numbers to log; None if it failed."""
  del prompt, completion
  if example.get("episode_error"):
    return None
  score = float(sum(example["turn_rewards"]))
  return {**example["episode_info"], "score": score}
