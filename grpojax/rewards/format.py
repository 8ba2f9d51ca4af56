"""The reward `format`, of the required structure of a completion."""

from collections.abc import Sequence
from typing import Any


def format(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  tags: Sequence[str] = ("think", "answer"),
) -> float:
  """1.0 for <think>...</think> <answer>...</answer> and nothing else, else 0.0.

  Each tag opens and closes once, in order, around more than whitespace; only
  whitespace is outside. The prompt may end in the first opening tag instead.
  Linear time. ValueError for no tags, or one twice.
  """
  if isinstance(tags, str) or not tags or len(set(tags)) != len(tags):
    raise ValueError(f"tags = {tags!r}: give different names, at least one")
  rest = completion
  if prompt.rstrip().endswith(f"<{tags[0]}>"):
    rest = f"<{tags[0]}>{completion}"
  marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
  if any(rest.count(mark) != 1 for mark in marks):
    return 0.0
  for tag in tags:
    outside, _, rest = rest.partition(f"<{tag}>")
    inside, closed, rest = rest.partition(f"</{tag}>")
    if outside.strip() or not closed or not inside.strip():
      return 0.0
  return float(not rest.strip())
