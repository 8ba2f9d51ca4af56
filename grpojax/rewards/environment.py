"""The reward `environment`: the sum of an environment's rewards over turns."""

from typing import Any


def environment(
  prompt: str, completion: str, example: dict[str, Any]
) -> dict[str, float] | None:
  """Returns the summed turn rewards and numbers to log; None after an error."""
  if example.get("episode_error"):
    return None
  score = float(sum(example["turn_rewards"]))
  return {**example["episode_info"], "score": score}
