"""Sampled completions, as the page browses them: whole groups, not too many."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from grpojax.reports.curves import is_number

BUDGET = 6_000_000
"""Bytes of completions of all runs in a page: what a browser opens at once."""

# Log-probabilities are less; so are finite numbers, and NaN is not.
_LARGE = 1e9


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
  """Takes a completion and what is known of it out of a row."""
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
    for name in ("logprobs", "trainer_logprobs", "ref_logprobs"):
      values = row.get(name)
      if isinstance(values, list) and len(values) == len(tokens):
        sample[name] = [
          round(x, 4)
          if isinstance(x, (int, float)) and abs(x) < _LARGE
          else None
          for x in values
        ]
    sample |= _turns(row.get("turns"), len(tokens))
  return sample


def _turns(turns: Any, length: int) -> dict[str, Any]:
  """Marks tokens of environments, and rewards at the last token of a turn."""
  if not isinstance(turns, list):
    return {}
  observed: list[bool] = []
  rewards = {}
  for turn in turns:
    count = turn.get("tokens") if isinstance(turn, dict) else None
    if not isinstance(count, int) or not 0 <= count <= length:
      return {}
    observed += [turn.get("by") == "environment"] * count
    if is_number(turn.get("reward")):
      rewards[len(observed) - 1] = turn["reward"]
  if len(observed) != length:
    return {}
  return {"observed": observed, "turn_rewards": rewards}


def groups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Puts rows of samples.jsonl together: a prompt and its completions.

  Rows without texts are left out; of an older run, whose rows do not say their
  group, neighbours with one prompt are one.
  """
  made: list[dict[str, Any]] = []
  last = None
  for row in rows:
    texts = row.get("prompt"), row.get("completion")
    if not all(isinstance(text, str) for text in texts):
      continue
    key = row["step"], row.get("group"), row["prompt"]
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
  """Steps whose completions fit into a page: the first, the last, and between.

  Args:
    sizes: bytes of JSON by step.
    budget: bytes of a page; a single step may be more.
  """
  steps = sorted(sizes)
  for stride in range(1, len(steps)):
    chosen = sorted({*steps[::-stride], *steps[:1]})
    if sum(sizes[step] for step in chosen) <= budget:
      return chosen
  return steps[-1:]
