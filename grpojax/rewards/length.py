"""Rewards of the length of a completion, in tokens, with its EOS.

They read what the training loop adds to an example: "completion_length",
"max_completion_length" and "finished" (whether an EOS ended it).
"""

from typing import Any


def length(
  prompt: str, completion: str, example: dict[str, Any], *, target: int = 0
) -> float:
  """Minus the distance from a target length, as a share of the longest.

  The penalty of L1 (arXiv 2503.04697, eq. 1) in units of the limit. With target
  0 shorter is better; with a negative weight longer is.

  Args:
    prompt: not used.
    completion: not used.
    example: with "completion_length" and "max_completion_length", in tokens.
    target: tokens.

  Returns:
    -|length - target| / max_completion_length.

  Raises:
    ValueError: a negative target.
  """
  del prompt, completion
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

  Up to L_max - L_cache tokens 0; from there linearly down to -1 at L_max, the
  limit on completions.

  Args:
    prompt: not used.
    completion: not used.
    example: with "completion_length" and "max_completion_length", in tokens.
    cache: L_cache, tokens; None is a fifth of the limit, as in the paper (4,096
      of 20,480). At most the limit.

  Returns:
    A number from -1.0 to 0.0.

  Raises:
    ValueError: a cache that is not positive.
  """
  del prompt, completion
  longest = example["max_completion_length"]
  size = longest / 5 if cache is None else min(cache, longest)
  if size <= 0:
    raise ValueError(f"cache = {cache}: must be positive, in tokens")
  over = example["completion_length"] - (longest - size)
  return -min(max(over / size, 0.0), 1.0)


def unfinished(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """-1.0 for a completion that the limit cut off, 0.0 for one with its EOS.

  Args:
    prompt: not used.
    completion: not used.
    example: with "finished".

  Returns:
    -1.0 or 0.0.
  """
  del prompt, completion
  return 0.0 if example["finished"] else -1.0
