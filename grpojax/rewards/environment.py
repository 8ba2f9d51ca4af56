"""Reward of an environment: the sum of what it gave for the turns."""

from typing import Any


def environment(
  prompt: str, completion: str, example: dict[str, Any]
) -> dict[str, float] | None:
  """Returns the trajectory's return, and the numbers that are logged of it.

  None where the environment failed, which leaves no reward in any case.
  """
  del prompt, completion
  if example.get("episode_error"):
    return None
  return {
    **example["episode_info"],
    "score": float(sum(example["turn_rewards"])),
  }
