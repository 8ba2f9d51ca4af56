"""Selects whole groups of sampled completions for the page."""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from grpojax.reports.curves import is_number

BUDGET = 6_000_000
"""Limit in bytes for a page's completions, so that browsers open it quickly."""

_SHOWN = (
  "completion reward truncated tokens logprobs trainer_logprobs ref_logprobs"
).split()
"""Keys of a row that the page shows unchanged (see `sample_rows`)."""


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row's completion with its rewards and values per token."""
  sample = {name: row[name] for name in _SHOWN if name in row}
  if is_number(row.get("advantage")):  # else a list, shown by turn
    sample["advantage"] = row["advantage"]
  if len(row.get("rewards", ())) > 1:
    sample["rewards"] = row["rewards"]
  return sample | (_turns(row["turns"]) if "turns" in row else {})


def _turns(turns: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Marks environment tokens; puts a turn's reward and advantage at its end."""
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
  """Converts rows of samples.jsonl to groups: prompts with completions."""
  result = []
  for _, group in itertools.groupby(rows, lambda x: (x["step"], x["group"])):
    first, *others = group
    answer = first.get("answer")
    if not (answer is None or isinstance(answer, str)):
      answer = json.dumps(answer, default=str)
    samples = [_sample(row) for row in (first, *others)]
    shared = {"step": first["step"], "prompt": first["prompt"]}
    result.append(shared | {"answer": answer, "samples": samples})
  return result


def steps_within(sizes: Mapping[int, int], budget: int = BUDGET) -> list[int]:
  """Returns evenly spaced steps with at most `budget` bytes of completions.

  `sizes` has bytes of JSON by step. The first and the last step are included;
  if even these two are too large, only the last.
  """
  steps = sorted(sizes)
  for stride in range(1, len(steps)):
    chosen = sorted({*steps[::-stride], *steps[:1]})
    if sum(sizes[step] for step in chosen) <= budget:
      return chosen
  return steps[-1:]
