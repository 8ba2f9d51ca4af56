"""The skeleton of a study: its directory, training runs, tables and pictures.

A study's directory, by default runs/NAME, holds config.json, the partial
results that make it resumable, and at the end results.csv, summary.json and
NAME.png. The same command resumes; another config is refused. A study that is
made of training runs has run R in runs/R, and what it printed in logs/R.txt.
"""

import contextlib
import csv
import io
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.core.options import Option
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.cli.settings import Section, section, setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.processes import interrupts
from grpojax.runtime.terminal import pictures
from grpojax.statistics.intervals import mean_interval
from grpojax.training.run import fit, open_run, run_directory
from grpojax.training.settings.run import TrainSettings

FLAGS = {"run_dir": setting("", 'where to write; "" = runs/NAME')}
"""The flags of every study."""
SEED = setting(0, "seed of all random numbers", within="[0, 2**32)")


def settings(name: str, **fields: Option | Section) -> Section:
  """Declares a study's settings; `name` is that of its module too."""
  about = "name of the study; its directory is runs/NAME"
  return section("the study", name=setting(name, about), **fields)


@contextlib.contextmanager
def study(
  argv: Sequence[str],
  declared: Section,
  config_errors: Callable[[ConfigDict], list[str]],
  about: str,
) -> Iterator[tuple[ConfigDict, pathlib.Path]]:
  """Starts or resumes a study; Ctrl-C ends it with a line that says how.

  `declared` are its `settings`; `config_errors` lists what is wrong with values
  that are in their ranges, and `about`, its docstring, is the text of --help.

  Yields:
    The config and the run directory.

  Raises:
    SystemExit: with a message, for a command line or a config that cannot be
      used, or a directory of something else.
  """
  with command_line.usage_errors():
    config, flags = command_line.parse(argv, FLAGS, declared, about)
    config_lib.refuse(
      settings_lib.key_errors(declared, config)
      or config_lib.name_errors(config.name)
      or settings_lib.value_errors(declared, config_lib.flatten(config))
      or config_errors(config)
    )
    directory = pathlib.Path(flags.run_dir or f"runs/{config.name}")
    disk.check_no_url(directory, "--run_dir")
    _open(directory, config)
  try:
    yield config, directory
  except KeyboardInterrupt:
    print("interrupted; the same command goes on with what is not done yet")
    interrupts.exit_program()


def _open(directory: pathlib.Path, config: ConfigDict) -> None:
  """Makes a study's directory, or checks that it is one of this config."""
  if directory.exists() and not directory.is_dir():
    raise ValueError(f"{directory} is a file; give a directory as --run_dir")
  path = directory / "config.json"
  if path.exists():
    try:
      saved = config_lib.from_json(path.read_text())
    except (OSError, ValueError) as error:
      raise ValueError(f"{path} is no study's config: {error}") from error
    changed = config_lib.difference(saved, config)
    if changed:
      raise ValueError(
        f"{directory} holds results of another config (its value -> yours):\n  "
        + "\n  ".join(changed)
        + "\ngive another --run_dir, or its own values to resume"
      )
  elif directory.exists() and any(directory.iterdir()):
    raise ValueError(
      f"{directory} is not empty and is no study: give a new directory as "
      "--run_dir"
    )
  else:
    directory.mkdir(parents=True, exist_ok=True)
    records.write_text(path, config_lib.to_json(config))


def time_left(began: float, done: int, count: int) -> str:
  """Time that the rest of `count` equal parts takes, as text."""
  seconds = (time.perf_counter() - began) / done * (count - done)
  return f"{records.duration(seconds)} left"


def training_run(directory: pathlib.Path, name: str) -> pathlib.Path:
  """Path of one of a study's training runs."""
  return directory / "runs" / name


def train_all(runs: Sequence[TrainSettings], directory: pathlib.Path) -> None:
  """Makes the training runs that are not finished yet.

  Raises:
    SystemExit: a run's directory has another config, or a run was stopped.
  """
  compilation.keep()  # the runs have programs in common
  unfinished = []
  with command_line.usage_errors():
    for run in runs:  # all of them before any trains
      path = training_run(directory, run.name)
      run_directory.check(path, open_run.as_begun(run, path))
      if not run_directory.is_finished(path):
        unfinished.append(run)
    (directory / "logs").mkdir(exist_ok=True)
  began = time.perf_counter()
  for i, run in enumerate(unfinished, 1):
    try:
      with (
        open(directory / "logs" / f"{run.name}.txt", "a") as log,
        contextlib.redirect_stdout(log),
      ):
        outcome = fit.run(run, training_run(directory, run.name))
    except SystemExit as stopped:
      if not isinstance(stopped.code, str):  # no error: only the log says it
        print(f"{run.name} did not end; the same command goes on from there")
      raise
    print(
      f"run {i}/{len(unfinished)}  {run.name}: accuracy "
      f"{outcome['accuracy_before']:.1%} -> {outcome['accuracy_after']:.1%}  "
      f"{time_left(began, i, len(unfinished))}",
      flush=True,
    )


def run_summary(directory: pathlib.Path, name: str) -> dict[str, Any]:
  """Reads a finished training run's summary."""
  path = training_run(directory, name) / run_directory.SUMMARY
  return json.loads(path.read_text())


def run_metrics(directory: pathlib.Path, name: str) -> list[dict[str, Any]]:
  """Reads a row a training step, with the accuracy where it was evaluated.

  Raises:
    SystemExit: the run lacks a step.
  """
  steps = run_summary(directory, name)["steps"]
  path = training_run(directory, name) / run_directory.METRICS
  rows = records.read_jsonl(path)
  accuracy = {r["step"]: r["accuracy"] for r in rows if "accuracy" in r}
  trained = [row for row in rows if "reward_mean" in row]
  if [row["step"] for row in trained] != [*range(1, steps + 1)]:
    raise SystemExit(
      f"error: {path} has not the steps 1 to {steps} of a finished run: delete "
      f"{path.parent} and run the same command, which makes it again"
    )
  return [row | {"accuracy": accuracy.get(row["step"])} for row in trained]


def by_step(
  rows: Sequence[Mapping[str, Any]], column: str
) -> dict[int, list[float]]:
  """Values of a column at each step, ascending; None is no value."""
  values: dict[int, list[float]] = {}
  for row in sorted(rows, key=lambda row: row["step"]):
    if row[column] is not None:
      values.setdefault(row["step"], []).append(row[column])
  return values


def with_interval(name: str, values: np.ndarray) -> dict[str, float]:
  """Columns of a mean over seeds and its 95% interval (Student's)."""
  middle, low, high = mean_interval(values)
  return {name: middle, f"{name}_low": low, f"{name}_high": high}


def size_errors(config: ConfigDict, *names: str) -> list[str]:
  """Lists those of the settings that are no whole numbers of 2 or more."""
  remedy = "give whole numbers of 2 or more"
  return [
    config_lib.config_error(name, config[name], remedy)
    for name in names
    if not config[name]
    or not all(isinstance(x, int) and x >= 2 for x in config[name])
  ]


def load_or_make(
  path: pathlib.Path, make: Callable[[], np.ndarray]
) -> np.ndarray:
  """Loads an array of an earlier start, or makes and saves it."""
  if path.exists():
    return np.load(path)
  array = make()
  with records.replacing(path) as temporary, open(temporary, "wb") as file:
    np.save(file, array)
  return array


def rounded(row: Mapping[str, Any], digits: int = 6) -> dict[str, Any]:
  """Rounds the floats of a row to some significant digits."""
  return {
    name: float(f"{x:.{digits}g}") if isinstance(x, float) else x
    for name, x in row.items()
  }


def write_tables(
  directory: pathlib.Path, **tables: Sequence[Mapping[str, Any]]
) -> None:
  """Writes NAME.csv of each table; its first row names the columns."""
  for name, rows in tables.items():
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    records.write_text(directory / f"{name}.csv", text.getvalue())


@contextlib.contextmanager
def picture(
  path: pathlib.Path, rows: int, columns: int, width: float = 4.0
) -> Iterator[np.ndarray]:
  """Yields axes [rows, columns], each `width` inches wide, and writes a PNG."""
  size = (width * columns, 0.8 * width * rows)
  figure = pictures.new_figure(size)
  yield figure.subplots(rows, columns, squeeze=False)
  pictures.save_figure(figure, path)
