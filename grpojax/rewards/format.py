"""The reward `format`, for completions with the required tags."""

from collections.abc import Sequence
from typing import Any


def format(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  tags: Sequence[str] = ("think", "answer"),
) -> float:
  """Returns 1.0 for exactly <think>...</think> <answer>...</answer>, else 0.0.

  Each pair of tags occurs once, in order, around more than whitespace; there is
  only whitespace outside. The first opening tag may end the prompt instead.
  Takes linear time. ValueError for no tags, or a tag given twice.
  """
  if isinstance(tags, str) or not tags or len(set(tags)) != len(tags):
    raise ValueError(f"tags = {tags!r}: list at least one tag, each once")
  text = completion
  if prompt.rstrip().endswith(f"<{tags[0]}>"):
    text = f"<{tags[0]}>{completion}"
  marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
  if any(text.count(mark) != 1 for mark in marks):
    return 0.0
  for tag in tags:
    outside, _, text = text.partition(f"<{tag}>")
    inside, closed, text = text.partition(f"</{tag}>")
    if outside.strip() or not closed or not inside.strip():
      return 0.0
  return float(not text.strip())
