"""A report on runs, from what their directories hold: one page of HTML.

A report is about what is there. Files may be missing, lines half-written or
broken, a run unfinished: the page says so, and shows the rest.
"""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.reports import comparisons, completions, curves, rewards
from grpojax.reports.metric_groups import layout
from grpojax.reports.page import page
from grpojax.runtime import config as config_lib
from grpojax.runtime import records
from grpojax.training import run_config, run_directory
from grpojax.training.config import default_config

FAILURES = 200  # shown of a run, at most
_LARGEST = 2**53  # a whole number that a page can tell from its neighbours

Rows = list[dict[str, Any]]


def _json(text: str | bytes) -> dict[str, Any] | None:
  """The object that a text holds, or None."""
  try:
    value = json.loads(text)
  except (RecursionError, ValueError):
    return None
  return value if isinstance(value, dict) else None


def _object(path: pathlib.Path) -> dict[str, Any] | None:
  try:
    return _json(path.read_bytes())
  except OSError:
    return None


def read_rows(path: pathlib.Path, notes: list[str]) -> Rows:
  """Rows of a file that say their step; none where there is no file.

  Args:
    path: a JSON lines file. A last line without an end is being written, and is
      left out; of others that are no such rows, the notes say how many.
    notes: added to.
  """
  try:
    lines = path.read_bytes().split(b"\n")[:-1]
  except FileNotFoundError:
    return []
  except OSError as error:
    notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    return []
  rows = [row for row in map(_json, lines) if row and _has_step(row)]
  broken = sum(map(bool, lines)) - len(rows)
  if broken:
    notes.append(f"{path.name}: {broken} lines are no rows, and are left out")
  return rows


def read_samples(
  path: pathlib.Path, notes: list[str], budget: int
) -> tuple[Rows, dict[str, int]]:
  """Rows of samples.jsonl, of as many steps as fit; others are not parsed.

  Args:
    path: the file, which may be larger than what fits into memory.
    notes: added to.
    budget: bytes, see `completions.steps_within`.

  Returns:
    The rows; of how many `steps` there are any, and of how many of them the
    rows are (`kept_steps`).
  """
  try:
    with open(path, "rb") as file:
      sizes: dict[int, int] = {}
      for line in file:
        if (step := _step_of(line)) is not None:
          sizes[step] = sizes.get(step, 0) + len(line)
      kept = set(completions.steps_within(sizes, budget))
      file.seek(0)
      rows = [_json(line) for line in file if _step_of(line) in kept]
  except FileNotFoundError:
    rows, kept, sizes = [], set(), {}
  except OSError as error:
    notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    rows, kept, sizes = [], set(), {}
  about = {"steps": len(sizes), "kept_steps": len(kept)}
  return [row for row in rows if row and _has_step(row)], about


def _step_of(line: bytes) -> int | None:
  """The step of a row that was written by a run: it stands first."""
  found = re.match(rb'\{"step": (\d{1,15}),.*\n', line)
  return int(found[1]) if found else None


def _has_step(row: Mapping[str, Any]) -> bool:
  step = row.get("step")
  whole = isinstance(step, int) and not isinstance(step, bool)
  return whole and 0 <= step < _LARGEST


def _failures(rows: Rows) -> dict[str, Any]:
  """Rewards that could not be computed: how many of each kind, and some."""
  counts: dict[tuple[str, str], int] = {}
  for row in rows:
    kind = str(row.get("function")), str(row.get("reason"))
    counts[kind] = counts.get(kind, 0) + 1
  names = ("function", "reason", "prompt", "completion")
  order = sorted(counts.items(), key=lambda item: -item[1])
  return {
    "total": len(rows),
    "counts": [[*kind, count] for kind, count in order[:FAILURES]],
    "rows": [
      {"step": row["step"]} | {name: _text(row.get(name)) for name in names}
      for row in rows[:FAILURES]
    ],
  }


def _text(value: Any) -> str | None:
  """What a row holds where a text belongs: no number, which may be NaN."""
  return value if value is None or isinstance(value, str) else str(value)


def _status(summary: Mapping[str, Any] | None, last: int, steps: Any) -> str:
  """Where a run stands, in words."""
  of = f" of {steps}" if isinstance(steps, int) else ""
  if summary is None:
    return f"step {last}{of}"
  return f"finished, {last}{of} steps"


def _flat(config: Mapping[str, Any] | None) -> dict[str, str]:
  """Settings by dotted name, as texts."""
  try:
    whole = config_lib.from_json(json.dumps(config or {}))
    leaves = config_lib.flatten(whole)
  except (AttributeError, KeyError, TypeError, ValueError):
    return {}
  return {str(name): repr(value) for name, value in leaves.items()}


def _read(
  path: pathlib.Path,
  name: str,
  summary: Mapping[str, Any] | None,
  budget: int,
) -> dict[str, Any]:
  """What a run directory says, and the columns to compare it by."""
  notes: list[str] = []
  files = (
    run_directory.METRICS,
    run_directory.REWARDS,
    run_directory.EVALUATIONS,
    run_directory.FAILURES,
  )
  metrics, counts, evaluations, failures = (
    read_rows(path / file, notes) for file in files
  )
  samples, about = read_samples(path / run_directory.SAMPLES, notes, budget)
  config = _object(path / run_config.CONFIG)
  if config is None:
    notes.append(f"{run_config.CONFIG} is missing or cannot be read")
  summary = summary or _object(path / run_directory.SUMMARY)
  last = max((row["step"] for row in metrics), default=0)
  columns = curves.columns(metrics)
  answers = comparisons.answers(evaluations)
  picture = rewards.picture(rewards.counted(counts))
  return {
    "columns": columns,
    "answers": answers,
    "settings": _flat(config),
    "shown": {
      "name": name,
      "status": _status(summary, last, (config or {}).get("steps")),
      "finished": summary is not None,
      "lastStep": last,
      "notes": notes,
      "curves": curves.curves(columns),
      "rewards": picture or rewards.picture(rewards.of_samples(samples)),
      "rewardsOfSamples": picture is None,
      "groups": completions.groups(samples),
      "sampled": about,
      "gain": comparisons.before_and_after(answers),
      "failures": _failures(failures),
      "speed": comparisons.speed(columns),
      "groupSize": comparisons.group_size(columns),
      "changes": _changes(path, notes),
    },
  }


def _changes(path: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
  """Settings that were changed when the run was resumed."""
  try:
    lines = (path / run_directory.CHANGES).read_bytes().split(b"\n")
  except OSError:
    return []
  rows = [row for row in map(_json, lines) if row]
  return [
    {
      "step": _text(row.get("after_step")),
      "changed": list(map(str, row["changed"])),
    }
    for row in rows
    if isinstance(row.get("changed"), list)
  ]


def _settings(runs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
  """All settings: first those in which runs differ, then those changed."""
  default = _flat(default_config().to_dict())
  names = sorted(default.keys() | set().union(*runs))
  rows = []
  for name in names:
    values = [run.get(name) for run in runs]
    given = [value for value in values if value is not None]
    rows.append(
      {
        "name": name,
        "default": default.get(name),
        "values": values,
        "differs": len(set(values)) > 1,
        "changed": any(value != default.get(name) for value in given),
      }
    )
  return sorted(rows, key=lambda row: (not row["differs"], not row["changed"]))


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
  """What the runs are called: as much of their paths as tells them apart."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    names = ["/".join(some[-count:]) for some in parts]
    if len(set(names)) == len(names):
      break
  return names


def report(
  paths: Sequence[pathlib.Path],
  names: Sequence[str] | None = None,
  summary: Mapping[str, Any] | None = None,
) -> str:
  """The page about runs.

  Args:
    paths: their directories.
    names: what to call them; None is by their directories.
    summary: of a single run that is about to write it.

  Raises:
    ValueError: a directory is no run's.
  """
  for path in paths:
    if not any(
      (path / x).is_file() for x in (run_config.CONFIG, run_directory.METRICS)
    ):
      raise ValueError(
        f"no run at {path}: give the run directory of a training run, the one "
        f"with its {run_config.CONFIG} and {run_directory.METRICS}"
      )
  names = names or _names(paths)
  budget = completions.BUDGET // len(paths)
  runs = [
    _read(path, name, summary, budget)
    for path, name in zip(paths, names, strict=True)
  ]
  first, *others = runs
  data = {
    "runs": [run["shown"] for run in runs],
    "layout": layout(name for run in runs for name in run["shown"]["curves"]),
    "settings": _settings([run["settings"] for run in runs]),
    "compared": [
      {
        "heldOut": comparisons.held_out(first["answers"], run["answers"]),
        "steps": comparisons.steps(first["columns"], run["columns"]),
      }
      for run in others
    ],
  }
  return page(f"{', '.join(names)} - grpojax", data)


def write(
  directory: pathlib.Path, summary: Mapping[str, Any] | None = None
) -> None:
  """Writes a run's report.html; where it cannot, a sentence says so.

  Nothing that goes wrong here ends a run.

  Args:
    directory: the run's.
    summary: of a run that is about to write it.
  """
  try:
    text = report([directory], summary=summary)
    records.write_text(directory / run_directory.REPORT, text)
  except Exception as error:  # whatever it is, the run is worth more
    said = f"{type(error).__name__}: {error}"
    print(f"{run_directory.REPORT} was not written: {said}", flush=True)
