"""Training runs that a study is made of: run one after another, and read."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime import command_line, records
from grpojax.training import fit, run_directory


def share_compilations(directory: pathlib.Path) -> None:
  """Programs that the runs have in common are compiled once, in `directory`."""
  jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def of(directory: pathlib.Path, name: str) -> pathlib.Path:
  """The run directory of one of a study's runs."""
  return directory / "runs" / name


def train_all(runs: Sequence[ConfigDict], directory: pathlib.Path) -> None:
  """Makes the training runs that are not finished yet.

  Args:
    runs: their configs; run NAME is in directory/runs/NAME.
    directory: the study's. What a run prints is in directory/logs/NAME.txt.

  Raises:
    SystemExit: a run's directory has another config, or a run was stopped.
  """
  todo = []
  with command_line.usage_errors():
    for run in runs:  # all of them before any trains
      path = of(directory, run.name)
      run_directory.check(path, run)
      todo += [] if run_directory.is_finished(path) else [run]
    (directory / "logs").mkdir(exist_ok=True)
  began = time.perf_counter()
  for i, run in enumerate(todo):
    try:
      with (
        open(directory / "logs" / f"{run.name}.txt", "a") as log,
        contextlib.redirect_stdout(log),
      ):
        found = fit.run(run, of(directory, run.name))
    except SystemExit as stopped:
      if not isinstance(stopped.code, str):  # no error: only the log says it
        print(f"{run.name} did not end; the same command goes on from there")
      raise
    spent = time.perf_counter() - began
    left = records.duration(spent / (i + 1) * (len(todo) - i - 1))
    print(
      f"run {i + 1}/{len(todo)}  {run.name}: accuracy "
      f"{found['accuracy_before']:.1%} -> {found['accuracy_after']:.1%}  "
      f"{left} left",
      flush=True,
    )


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
  """Says of a file that cannot be read what to do."""
  try:
    yield
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path} is not that of a finished run ({error!r}): delete "
      f"{path.parent} and run the same command, which makes it again"
    ) from None


def summary(directory: pathlib.Path, name: str) -> dict[str, Any]:
  """What a finished run says of itself: "steps" and "accuracy_after".

  Raises:
    ValueError: it does not.
  """
  path = of(directory, name) / run_directory.SUMMARY
  with _reading(path):
    found = json.loads(path.read_text())
    return found | {
      "steps": int(found["steps"]),
      "accuracy_after": float(found["accuracy_after"]),
    }


def metrics(directory: pathlib.Path, name: str) -> list[dict[str, Any]]:
  """One row a training step, with the accuracy where it was evaluated.

  Raises:
    ValueError: the run lacks a step, or its file is damaged.
  """
  steps = summary(directory, name)["steps"]
  path = of(directory, name) / run_directory.METRICS
  with _reading(path):
    rows = records.read_jsonl(path)
    accuracy = {r["step"]: r["accuracy"] for r in rows if "accuracy" in r}
    trained = [row for row in rows if "reward_mean" in row]
    if [row["step"] for row in trained] != [*range(1, steps + 1)]:
      raise ValueError(f"{len(trained)} steps in place of 1 to {steps}")
    np.array([row["reward_mean"] for row in trained], np.float64)  # null is nan
    return [row | {"accuracy": accuracy.get(row["step"])} for row in trained]
