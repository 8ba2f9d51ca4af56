"""Sampled completions, as the page browses them: whole groups, not too many."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from grpojax.reports.curves import is_number

BUDGET = 6_000_000
"""Bytes of completions of all runs in a page: what a browser opens at once."""

_TEXTS = ("prompt", "completion")
_LARGE = (
  1e9  # log-probabilities are less; so are finite numbers, and NaN is not
)
_LOGPROBS = ("logprobs", "trainer_logprobs", "ref_logprobs")


def _numbers(values: Any, count: int) -> list[float | None] | None:
  if not isinstance(values, list) or len(values) != count:
    return None
  return [
    round(value, 4)
    if isinstance(value, (int, float)) and abs(value) < _LARGE
    else None
    for value in values
  ]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
  """A completion with what is known of it, whatever else the row has."""
  sample = {"completion": row["completion"]}
  for name in ("reward", "advantage"):
    sample[name] = row[name] if is_number(row.get(name)) else None
  sample["truncated"] = row.get("truncated") is True
  rewards = row.get("rewards")
  if isinstance(rewards, dict) and len(rewards) > 1:
    sample["rewards"] = {
      str(name): value if is_number(value) else None
      for name, value in rewards.items()
    }
  tokens = row.get("tokens")
  if isinstance(tokens, list) and all(isinstance(x, str) for x in tokens):
    sample["tokens"] = tokens
    for name in _LOGPROBS:
      values = _numbers(row.get(name), len(tokens))
      if values is not None:
        sample[name] = values
  return sample


def groups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Rows of samples.jsonl put together: a prompt and its completions.

  Rows without texts are left out; of an older run, whose rows do not say their
  group, neighbours with one prompt are one.
  """
  found: list[dict[str, Any]] = []
  last = None
  for row in rows:
    if not all(isinstance(row.get(name), str) for name in _TEXTS):
      continue
    key = row["step"], row.get("group"), row["prompt"]
    if key != last:
      answer = row.get("answer")
      if not (answer is None or isinstance(answer, str)):
        answer = json.dumps(answer, default=str)
      group = {"step": row["step"], "prompt": row["prompt"], "answer": answer}
      found.append(group | {"samples": []})
    last = key
    found[-1]["samples"].append(_sample(row))
  return found


def steps_within(sizes: Mapping[int, int], budget: int = BUDGET) -> list[int]:
  """Which steps' completions a page has: the first, the last, some between.

  Args:
    sizes: bytes of JSON by step.
    budget: bytes; of a single step it may be more.
  """
  steps = sorted(sizes)
  for stride in range(1, len(steps)):
    kept = sorted({*steps[::-stride], *steps[:1]})
    if sum(sizes[step] for step in kept) <= budget:
      return kept
  return steps[-1:]
