"""Shared code of the studies: command line, directory, training runs, files.

A study's directory, by default runs/NAME, holds config.json, partial results,
and finally tables (CSV), summary.json and NAME.png. The same command resumes; a
different config is refused. The directory's runs/R belongs to training run R,
and its logs/R.txt is the run's output.
"""

import contextlib
import csv
import io
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from grpojax.core.options import Option
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line, configs
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.cli.settings import Section, section, setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.processes import interrupts
from grpojax.statistics.intervals import mean_interval
from grpojax.training.files import run_directory
from grpojax.training.run import fit, open_run
from grpojax.training.settings.run import TrainSettings, completed

FLAGS = {"run_dir": setting("", 'output directory; "" = runs/NAME')}
SEED = setting(0, "seed of all random numbers", within="[0, 2**32)")
# Training settings of the studies, sized for two cores
QUICK = {
  "steps": 24,
  "data.options.difficulty": (2, 2),
  "sampling.max_new_tokens": 56,
  "log.trackers": (),
  "checkpoint.every": 24,
}

Row = Mapping[str, Any]
Rows = Sequence[Row]
ConfigErrors = Callable[[ConfigDict], Iterable[str | tuple[str, str]]]
"""Lists errors that range checks miss: texts, or (setting, remedy)."""


class Results(NamedTuple):
  """Results of a study: its files, and lines to print."""

  tables: Mapping[str, Rows]  # rows of NAME.csv, which leaves out lists
  lines: Sequence[str]
  draw: Callable[[np.ndarray], None]  # into axes [rows, columns]
  panels: tuple[int, int]  # rows and columns of the picture
  summary: Row  # content of summary.json


def settings(name: str, **fields: Option | Section) -> Section:
  """Declares the settings of the study in the module `name`."""
  about = "name of the study; its directory is runs/NAME"
  return section("the study", name=setting(name, about), **fields)


def execute(
  argv: Sequence[str],
  declared: Section,
  config_errors: ConfigErrors,
  about: str,
  compute: Callable[[ConfigDict, pathlib.Path], Results],
) -> None:
  """Starts or resumes a study with `argv`, and writes its results.

  `about` is the text of --help. `compute` gets the config and the directory for
  partial results. Exits with a message for a bad command line, config or
  directory, and without a message after Ctrl-C.
  """
  config, directory = open_study(argv, declared, config_errors, about)
  try:
    results = compute(config, directory)
    _write(results, directory, declared.fields["name"].default)
  except KeyboardInterrupt:
    print("interrupted; the same command resumes the study")
    interrupts.exit_program()


def _write(results: Results, directory: pathlib.Path, name: str) -> None:
  """Writes the tables, the summary and the picture, and prints the lines."""
  for table, rows in results.tables.items():
    text = io.StringIO()
    columns = [k for k, x in rows[0].items() if not isinstance(x, list)]
    options = {"extrasaction": "ignore", "lineterminator": "\n"}
    writer = csv.DictWriter(text, columns, **options)
    writer.writeheader()
    writer.writerows(rows)
    records.write_text(directory / f"{table}.csv", text.getvalue())
  records.write_json(directory / "summary.json", results.summary)
  rows, columns = results.panels
  figure = new_figure((4 * columns, 3.2 * rows))
  results.draw(figure.subplots(rows, columns, squeeze=False))
  with records.replacing(directory / f"{name}.png") as temporary:
    figure.savefig(temporary, format="png")
  for line in results.lines:
    print(line)
  print(f"tables and picture are in {directory}/")


def open_study(
  argv: Sequence[str],
  declared: Section,
  config_errors: ConfigErrors,
  about: str,
) -> tuple[ConfigDict, pathlib.Path]:
  """Reads a study's command line and opens its directory; see `execute`."""
  with command_line.usage_errors():
    config, flags = command_line.parse(argv, FLAGS, declared, about)
    flat = configs.flatten(config)

    def error(x):
      if isinstance(x, str):
        return x
      return configs.config_error(x[0], flat[x[0]], x[1])

    configs.refuse(
      settings_lib.key_errors(declared, config)
      or configs.name_errors(config.name)
      or settings_lib.value_errors(declared, flat)
      or [*map(error, config_errors(config))]
    )
    directory = pathlib.Path(flags.run_dir or f"runs/{config.name}")
    disk.check_no_url(directory, "--run_dir")
    _open(directory, config)
  return config, directory


def _open(directory: pathlib.Path, config: ConfigDict) -> None:
  """Creates a study's directory, or checks that its config equals `config`."""
  if directory.exists() and not directory.is_dir():
    raise ValueError(f"{directory} is a file: give a directory as --run_dir")
  path = directory / "config.json"
  if path.exists():
    try:
      saved = configs.from_json(path.read_text())
    except (OSError, ValueError) as error:
      text = f"{path} is not a study's config: give a new --run_dir: {error}"
      raise ValueError(text) from error
    if changed := configs.difference(saved, config):
      raise ValueError(
        f"{directory} holds results of another config (its value -> yours):\n  "
        + "\n  ".join(changed)
        + "\ngive another --run_dir, or use its values to resume"
      )
  elif directory.exists() and any(directory.iterdir()):
    raise ValueError(
      f"{directory} is not empty and holds no study: give a new --run_dir"
    )
  else:
    directory.mkdir(parents=True, exist_ok=True)
    records.write_text(path, configs.to_json(config))


def time_left(began: float, done: int, count: int) -> str:
  """Estimates the time left after `done` of `count` equal parts, as text."""
  seconds = (time.perf_counter() - began) / done * (count - done)
  return f"{records.duration(seconds)} left"


# Training runs


def train_all(runs: Sequence[TrainSettings], directory: pathlib.Path) -> None:
  """Trains the unfinished runs; exits if a run stops or has another config."""
  compilation.keep()  # so that runs share compiled programs
  unfinished = []
  with command_line.usage_errors():
    for run in runs:  # check all of them before training starts
      path = directory / "runs" / run.name
      run_directory.check(
        path, completed(run, open_run.recorded_facts(run, path))
      )
      if not run_directory.is_finished(path):
        unfinished.append(run)
    (directory / "logs").mkdir(exist_ok=True)
  began = time.perf_counter()
  for i, run in enumerate(unfinished, 1):
    log_path = directory / "logs" / f"{run.name}.txt"
    try:
      with open(log_path, "a") as log, contextlib.redirect_stdout(log):
        outcome = fit.run(run, directory / "runs" / run.name)
    except SystemExit as stopped:
      if not isinstance(stopped.code, str):  # the log has the reason
        print(f"{run.name} was stopped; the same command resumes it")
      raise
    print(
      f"run {i}/{len(unfinished)}  {run.name}: accuracy "
      f"{outcome['accuracy_before']:.1%} -> {outcome['accuracy_after']:.1%}  "
      f"{time_left(began, i, len(unfinished))}",
      flush=True,
    )


def run_metrics(directory: pathlib.Path, name: str) -> list[dict[str, Any]]:
  """Reads a run's metrics and accuracy by step; exits if a step is missing."""
  run = directory / "runs" / name
  steps = json.loads((run / run_directory.SUMMARY).read_text())["steps"]
  path = run / run_directory.METRICS
  rows = records.read_jsonl(path)
  accuracy = {r["step"]: r["accuracy"] for r in rows if "accuracy" in r}
  trained = [row for row in rows if "reward_mean" in row]
  if [row["step"] for row in trained] != [*range(1, steps + 1)]:
    raise SystemExit(
      f"error: {path} lacks some of the steps 1 to {steps}: delete {run} and "
      "run the same command again"
    )
  return [row | {"accuracy": accuracy.get(row["step"])} for row in trained]


def trained(
  labels: Rows,
  runs: Sequence[TrainSettings],
  directory: pathlib.Path,
  metrics: Mapping[str, str],
) -> list[dict[str, Any]]:
  """Trains runs; returns a row per step: the run's labels, then `metrics`."""
  train_all(runs, directory)
  return [
    {**label, "step": row["step"]}
    | {column: row.get(metric) for column, metric in metrics.items()}
    for label, run in zip(labels, runs, strict=True)
    for row in run_metrics(directory, run.name)
  ]


# Tables


def select(rows: Rows, **values: Any) -> list[Row]:
  """Returns the rows with these values in the named columns."""
  return [row for row in rows if all(row[k] == v for k, v in values.items())]


def run_means(rows: Rows, column: str, runs: Rows) -> np.ndarray:
  """Returns a column's mean over the rows of each run; nan without values.

  `runs` has the labels of each run. Means leave out None.
  """
  means = []
  for run in runs:
    values = [row[column] for row in select(rows, **run)]
    values = [x for x in values if x is not None]
    means.append(np.mean(values) if values else math.nan)
  return np.array(means)


def by_step(rows: Rows, column: str) -> dict[int, list[float]]:
  """Returns the values of a column by step, ascending, without Nones."""
  values: dict[int, list[float]] = {}
  for row in sorted(rows, key=lambda row: row["step"]):
    if row[column] is not None:
      values.setdefault(row["step"], []).append(row[column])
  return values


def with_interval(name: str, values: np.ndarray) -> dict[str, float]:
  """Returns columns of a mean over seeds and its 95% interval (Student's)."""
  middle, low, high = mean_interval(values)
  return {name: middle, f"{name}_low": low, f"{name}_high": high}


def ends(row: Row, name: str) -> list[float | None]:
  """Returns mean, low and high from the columns of `with_interval`."""
  return [row[f"{name}{end}"] for end in ("", "_low", "_high")]


def rounded(row: Row, digits: int = 6) -> dict[str, Any]:
  """Rounds the floats of a row to `digits` significant digits."""
  return {
    name: float(f"{x:.{digits}g}") if isinstance(x, float) else x
    for name, x in row.items()
  }


def size_errors(config: ConfigDict, *names: str) -> list[tuple[str, str]]:
  """Lists errors of the named settings that are not whole numbers above 1."""
  return [
    (name, "give whole numbers of 2 or more")
    for name in names
    if not config[name]
    or not all(isinstance(x, int) and x >= 2 for x in config[name])
  ]


# Pictures


def new_figure(size: tuple[float | int, float | int]):
  """Returns an empty figure of `size` (width, height) in inches."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure  # not pyplot: it has global state

  figure = Figure(figsize=size, dpi=100, layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
  """Sets an x axis of group sizes."""
  axes.set_xscale("log", base=2)
  axes.set_xticks(sizes, [str(size) for size in sizes])
