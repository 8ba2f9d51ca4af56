"""Rewards for the length of a completion, in tokens including the EOS.

These rewards read keys that `pool.submit_groups` adds to an example.
"""

from typing import Any


def length(
  prompt: str, completion: str, example: dict[str, Any], *, target: int = 0
) -> float:
  """Returns -|length - target| / max_completion_length.

  This is LCPO's penalty (arXiv 2503.04697, eq. 1) in units of the length limit.
  ValueError for a negative target.
  """
  if target < 0:
    raise ValueError(f"target = {target}: must be 0 or more tokens")
  distance = abs(example["completion_length"] - target)
  return -distance / example["max_completion_length"]


def overlong(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  cache: int | None = None,
) -> float:
  """Returns DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

  It is 0 up to L_max - L_cache tokens, and falls to -1 at L_max, the limit.
  L_cache is `cache` tokens, at most L_max; None is L_max / 5, as in the paper.
  ValueError for a cache that is not positive.
  """
  longest = example["max_completion_length"]
  size = longest / 5 if cache is None else min(cache, longest)
  if size <= 0:
    raise ValueError(f"cache = {cache}: must be positive, in tokens")
  over = example["completion_length"] - (longest - size)
  return -min(max(over / size, 0.0), 1.0)


def unfinished(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """Returns -1.0 for a completion cut off by the length limit, else 0.0."""
  return 0.0 if example["finished"] else -1.0
