"""Training runs that a study is made of: run one after another, and read."""

import contextlib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from grpojax.runtime import records
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
  """
  todo = [
    run
    for run in runs
    if not run_directory.is_finished(of(directory, run.name))
  ]
  (directory / "logs").mkdir(exist_ok=True)
  began = time.perf_counter()
  for i, run in enumerate(todo):
    with (
      open(directory / "logs" / f"{run.name}.txt", "a") as log,
      contextlib.redirect_stdout(log),
    ):
      summary = fit.run(run, of(directory, run.name))
    spent = time.perf_counter() - began
    left = records.duration(spent / (i + 1) * (len(todo) - i - 1))
    print(
      f"run {i + 1}/{len(todo)}  {run.name}: accuracy "
      f"{summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}  "
      f"{left} left",
      flush=True,
    )


def metrics(directory: pathlib.Path, name: str) -> list[dict[str, Any]]:
  """One row a training step, with the accuracy where it was evaluated."""
  rows = records.read_jsonl(of(directory, name) / run_directory.METRICS)
  accuracy = {r["step"]: r["accuracy"] for r in rows if "accuracy" in r}
  return [
    row | {"accuracy": accuracy.get(row["step"])}
    for row in rows
    if "reward_mean" in row
  ]
