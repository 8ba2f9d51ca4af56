"""The rewards of a run as a picture: how they are distributed, step by step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.reports.curves import is_number, short

COLUMNS = 100  # of steps, at most
VALUES = 12  # rewards that are told apart; of more, intervals
BINS = 20

Counts = dict[int, list[tuple[float, int]]]  # by step: rewards, how often


def counted(rows: Iterable[Mapping[str, Any]]) -> Counts:
  """Counts by step from rows of rewards.jsonl; what is none is left out."""
  found = {}
  for row in rows:
    pairs = row.get("counts")
    if isinstance(pairs, list):
      found[row["step"]] = [
        (float(pair[0]), int(pair[1]))
        for pair in pairs
        if isinstance(pair, list)
        and len(pair) == 2
        and all(map(is_number, pair))
        and pair[1] > 0
      ]
  return found


def of_samples(rows: Iterable[Mapping[str, Any]]) -> Counts:
  """The same of the rewards in samples.jsonl: of a few groups only."""
  found: Counts = {}
  for row in rows:
    if is_number(row.get("reward")):
      found.setdefault(row["step"], []).append((float(row["reward"]), 1))
  return found


def _rows_of(values: Sequence[float]):
  """Edges of the picture's rows where there are many rewards, and its names."""
  different = sorted(set(values))
  if len(different) <= VALUES:
    return None, [[value, value] for value in different]
  edges = np.linspace(different[0], different[-1], BINS + 1)
  pairs = zip(edges, edges[1:], strict=False)
  return edges, [[short(a), short(b)] for a, b in pairs]


def picture(counts: Counts) -> dict[str, Any] | None:
  """Shares of rewards by steps; None where there are no rewards.

  Returns:
    `steps`, first and last of each column; `values`, lowest and highest of each
    row; `shares`, [columns][rows], of all rewards of the column; `total`, how
    many rewards there are.
  """
  pairs = [pair for some in counts.values() for pair in some]
  if not pairs:
    return None
  edges, names = _rows_of([value for value, _ in pairs])
  firsts = [low for low, _ in names]
  steps = sorted(counts)
  size = math.ceil(len(steps) / COLUMNS)
  shares, columns = [], []
  for start in range(0, len(steps), size):
    some = steps[start : start + size]
    column = np.zeros(len(names))
    for value, count in (pair for step in some for pair in counts[step]):
      if edges is None:
        row = firsts.index(value)
      else:
        row = min(int(np.searchsorted(edges, value, "right")) - 1, BINS - 1)
      column[row] += count
    columns.append([some[0], some[-1]])
    shares.append([short(x) for x in column / max(column.sum(), 1)])
  total = sum(count for _, count in pairs)
  return {"steps": columns, "values": names, "shares": shares, "total": total}
