"""Rewards of the length of a completion, in tokens with its EOS.

The training loop adds "completion_length", "max_completion_length" and
"finished" (an EOS ended it) to an example.
"""

from typing import Any


def length(
  prompt: str, completion: str, example: dict[str, Any], *, target: int = 0
) -> float:
  """Minus the distance from a target length, as a share of the longest.

  The penalty of L1 (arXiv 2503.04697, eq. 1) in units of the limit:
  -|length - target| / max_completion_length. ValueError for a negative target.
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
  """DAPO's soft punishment of overlong completions (arXiv 2503.14476, eq. 13).

  0 up to L_max - L_cache tokens, then linearly to -1 at L_max, the limit on
  completions. L_cache is `cache` tokens, at most the limit; None is a fifth of
  it, as in the paper. ValueError for a cache that is not positive.
  """
  longest = example["max_completion_length"]
  size = longest / 5 if cache is None else min(cache, longest)
  if size <= 0:
    raise ValueError(f"cache = {cache}: must be positive, in tokens")
  over = example["completion_length"] - (longest - size)
  return -min(max(over / size, 0.0), 1.0)


def unfinished(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """-1.0 for a completion that the limit cut off, 0.0 for one with its EOS."""
  return 0.0 if example["finished"] else -1.0
