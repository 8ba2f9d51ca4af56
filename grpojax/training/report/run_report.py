"""HTML report on one or several runs, finished or not.

Missing files and broken lines are listed on the page.
"""

import collections
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpojax.reports import comparisons, curves
from grpojax.reports.metric_groups import layout
from grpojax.reports.page import page
from grpojax.runtime.cli import configs
from grpojax.runtime.files import records
from grpojax.training.config import default_config
from grpojax.training.files import run_directory
from grpojax.training.report import verdict

FAILURES = 200  # maximum number of failed rewards shown per run
EPISODES = "path", "tools"  # settings that turn the environment on

BUDGET = 6_000_000
"""Limit in bytes for a page's completions, so that browsers open it quickly."""

_SHOWN = (
  "completion reward truncated tokens logprobs trainer_logprobs ref_logprobs"
).split()
"""Keys of a row that the page shows unchanged (see `sample_rows`)."""

Rows = list[dict[str, Any]]


def _cannot_be_read(path: pathlib.Path, error: OSError) -> list[str]:
  """Returns a note that a file cannot be read; [] if it does not exist."""
  if isinstance(error, FileNotFoundError):
    return []
  return [f"{path.name} cannot be read: {error.strerror or error}"]


def read_rows(path: pathlib.Path, notes: list[str], key: str = "step") -> Rows:
  """Reads the rows that have this `key`; returns [] for a missing file.

  Ignores an unfinished last line; adds the number of broken lines to `notes`.
  """
  try:
    lines = path.read_bytes().split(b"\n")[:-1]
  except OSError as error:
    notes += _cannot_be_read(path, error)
    return []
  rows = [row for row in map(records.json_object, lines) if row and key in row]
  broken = sum(map(bool, lines)) - len(rows)
  if broken:
    notes.append(f"{path.name}: {broken} broken lines were ignored")
  return rows


def read_samples(
  path: pathlib.Path, notes: list[str], budget: int
) -> tuple[Rows, dict[str, int]]:
  """Reads samples.jsonl for as many steps as fit into `budget` bytes.

  Parses no other rows, because the file may be larger than memory. Also returns
  the number of `steps` in the file, and of `kept_steps` in the result.
  """
  sizes: dict[int, int] = collections.defaultdict(int)
  try:
    with open(path, "rb") as file:
      for line in file:
        if (step := _step_of(line)) is not None:
          sizes[step] += len(line)
      chosen = set(steps_within(sizes, budget))
      file.seek(0)
      lines = [line for line in file if _step_of(line) in chosen]
  except OSError as error:
    notes += _cannot_be_read(path, error)
    return [], {"steps": 0, "kept_steps": 0}
  about = {"steps": len(sizes), "kept_steps": len(chosen)}
  return [*filter(None, map(records.json_object, lines))], about


def _step_of(line: bytes) -> int | None:
  """Returns the step at the start of a row; None for a broken line."""
  match = re.match(rb'\{"step": (\d{1,15}),.*\n', line)
  return int(match[1]) if match else None


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
  sample = {name: row[name] for name in _SHOWN if name in row}
  if curves.is_number(row.get("advantage")):  # else a list, shown by turn
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


def sample_groups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def _failures(rows: Rows) -> dict[str, Any]:
  counts = collections.Counter((row["function"], row["reason"]) for row in rows)
  return {
    "total": len(rows),
    "counts": [[*kind, n] for kind, n in counts.most_common(FAILURES)],
    "rows": rows[:FAILURES],
  }


def _flat(config: Any) -> dict[str, str]:
  """Returns the `repr` of each setting by dotted name."""
  return {name: repr(x) for name, x in configs.flatten(config).items()}


def _read(path: pathlib.Path, name: str, finished: bool, budget: int) -> dict:
  notes: list[str] = []
  metrics = read_rows(path / run_directory.METRICS, notes)
  counts = read_rows(path / run_directory.REWARDS, notes)
  evaluations = read_rows(path / run_directory.EVALUATIONS, notes)
  failures = read_rows(path / run_directory.FAILURES, notes)
  changes = read_rows(path / run_directory.CHANGES, notes, "after_step")
  samples, about = read_samples(path / run_directory.SAMPLES, notes, budget)
  try:
    config = configs.from_json((path / run_directory.CONFIG).read_text())
  except (OSError, ValueError):
    config = configs.from_json("{}")
    notes.append(f"{run_directory.CONFIG} is missing or cannot be read")
  finished = finished or run_directory.is_finished(path)
  last = max((row["step"] for row in metrics), default=0)
  done = f"{last} of {config.steps}" if "steps" in config else f"{last}"
  columns = curves.columns(metrics)
  answers = comparisons.answers(evaluations)
  gain = comparisons.before_and_after(answers)
  planned = config.get("steps")
  limits = dict(config.get("stop", {}))
  facts = verdict.facts(metrics, planned, limits, finished, gain)
  sizes = comparisons.group_size(columns)
  if sizes:  # JSON has no infinity
    sizes = [curves.short(x) if curves.is_number(x) else None for x in sizes]
  return {
    "columns": columns,
    "answers": answers,
    "settings": _flat(config),
    "shown": {
      "name": name,
      "verdict": verdict.verdict(facts),
      "troubled": verdict.troubled_metrics(facts),
      "episodes": any(config.get("environment", {}).get(x) for x in EPISODES),
      "status": f"finished, {done} steps" if finished else f"step {done}",
      "finished": finished,
      "lastStep": last,
      "notes": notes,
      "curves": curves.curves(columns),
      "rewards": curves.reward_picture(
        {row["step"]: row["counts"] for row in counts}
      ),
      "groups": sample_groups(samples),
      "sampled": about,
      "gain": gain,
      "heldOut": comparisons.texts_before_and_after(evaluations),
      "failures": _failures(failures),
      "speed": comparisons.speed(columns),
      "groupSize": sizes
      and dict(zip(("best", "low", "high"), sizes, strict=True)),
      "changes": [
        {"step": row["after_step"], "changed": row["changed"]}
        for row in changes
      ],
    },
  }


def _settings(runs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
  """Returns all settings; settings that differ between runs come first."""
  default = _flat(default_config())
  rows = []
  for name in sorted(default.keys() | set().union(*runs)):
    values = [run.get(name) for run in runs]
    known = {value for value in values if value is not None}
    rows.append(
      {
        "name": name,
        "default": default.get(name),
        "values": values,
        "differs": len(set(values)) > 1,
        "changed": bool(known - {default.get(name)}),
      }
    )
  return sorted(rows, key=lambda row: (not row["differs"], not row["changed"]))


def _short_names(paths: Sequence[pathlib.Path]) -> list[str]:
  """Returns the shortest ends of the paths that distinguish all runs."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    names = ["/".join(path_parts[-count:]) for path_parts in parts]
    if len(set(names)) == len(names):
      break
  return names


def report(
  paths: Sequence[pathlib.Path],
  names: Sequence[str] | None = None,
  finished: bool = False,
) -> str:
  """Returns the HTML report; ValueError for a directory without a run.

  By default runs are named by the ends of their paths. `finished` is True for a
  single run that is finished but has not written its summary yet.
  """
  for path in paths:
    # A config.json is not enough: model directories also have it.
    has_records = any((path / x).is_file() for x in run_directory.RECORDS)
    if not has_records and run_directory.saved(path) is None:
      raise ValueError(
        f"no run at {path}: give the run directory of a training run, with its "
        f"{run_directory.CONFIG} and {run_directory.METRICS}"
      )
  names = names or _short_names(paths)
  budget = BUDGET // len(paths)
  runs = [
    _read(path, name, finished, budget)
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


def write(directory: pathlib.Path, finished: bool = False) -> None:
  """Writes a run's report.html; errors are printed, so that the run goes on."""
  try:
    text = report([directory], finished=finished)
    records.write_text(directory / run_directory.REPORT, text)
  except Exception as error:
    reason = f"{type(error).__name__}: {error}"
    print(f"{run_directory.REPORT} was not written: {reason}", flush=True)
