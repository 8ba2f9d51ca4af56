"""Sampled completions, as the page browses them: whole groups, not too many."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from grpojax.reports.curves import is_number

BUDGET = 6_000_000
"""Bytes of completions of all runs in a page: what a browser opens at once."""

_SHOWN = (
  "completion",
  "reward",
  "truncated",
  "tokens",
  "logprobs",
  "trainer_logprobs",
  "ref_logprobs",
)
"""Keys of a row that the page shows as they are (see `sample_rows`)."""


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
  """Takes a completion and what is known of it out of a row."""
  sample = {name: row[name] for name in _SHOWN if name in row}
  if is_number(row.get("advantage")):  # not one of each turn
    sample["advantage"] = row["advantage"]
  if len(row.get("rewards", ())) > 1:
    sample["rewards"] = row["rewards"]
  return sample | (_turns(row["turns"]) if "turns" in row else {})


def _turns(turns: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Marks environment tokens; a turn's numbers are at its last token."""
  observed: list[bool] = []
  numbers: dict[str, dict[int, float]] = {"reward": {}, "advantage": {}}
  for turn in turns:
    observed += [turn["by"] == "environment"] * turn["tokens"]
    for name, values in numbers.items():
      if turn.get(name) is not None:
        values[len(observed) - 1] = turn[name]
  by_name = {f"turn_{name}s": values for name, values in numbers.items()}
  return {"observed": observed} | by_name


def groups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Puts rows of samples.jsonl together: a prompt and its completions."""
  made: list[dict[str, Any]] = []
  last = None
  for row in rows:
    key = row["step"], row["group"]
    if key != last:
      answer = row.get("answer")
      if not (answer is None or isinstance(answer, str)):
        answer = json.dumps(answer, default=str)
      group = {"step": row["step"], "prompt": row["prompt"], "answer": answer}
      made.append(group | {"samples": []})
    last = key
    made[-1]["samples"].append(_sample(row))
  return made


def steps_within(sizes: Mapping[int, int], budget: int = BUDGET) -> list[int]:
  """Steps whose completions fit into `budget` bytes, with first and last.

  `sizes` has bytes of JSON by step; a single step may be larger.
  """
  steps = sorted(sizes)
  for stride in range(1, len(steps)):
    chosen = sorted({*steps[::-stride], *steps[:1]})
    if sum(sizes[step] for step in chosen) <= budget:
      return chosen
  return steps[-1:]
