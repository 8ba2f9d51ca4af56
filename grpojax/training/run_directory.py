"""A training run's directory: its files, their names, and whose run it is."""

import os
import pathlib
import shutil

from ml_collections import ConfigDict

from grpojax.runtime import config as config_lib
from grpojax.runtime.records import read_jsonl, write_text
from grpojax.training import validation
from grpojax.training.config import WORDS, default_config

CONFIG = "config.json"  # the resolved config, written once
REFERENCE = "reference"  # the reference policy, saved once
CHECKPOINTS = "checkpoints"  # STEP/, a `TrainState` each, the newest few
METRICS = "metrics.jsonl"  # one row a step, and one an evaluation
SAMPLES = "samples.jsonl"  # completions with their rewards
FAILURES = "failures.jsonl"  # rewards that could not be computed
TENSORBOARD = "tensorboard"  # the metrics again
MODEL = "model"  # the trained model, in Hugging Face format
CURVE = "learning_curve.png"
SUMMARY = "summary.json"  # written last: the run is finished

RECORDS = (METRICS, SAMPLES, FAILURES)
"""Files of rows that each say their step: cut where a run is resumed."""


def is_run(path: str | os.PathLike) -> bool:
  """Whether a directory is that of a run with checkpoints."""
  return (pathlib.Path(path) / CHECKPOINTS).is_dir()


def is_finished(path: str | os.PathLike) -> bool:
  """Whether a run has come to its end."""
  return (pathlib.Path(path) / SUMMARY).exists()


def model_directory(path: str | os.PathLike) -> pathlib.Path:
  """Where a model is: a finished run's, or the path as it is given."""
  model = pathlib.Path(path) / MODEL
  return model if (model / "config.json").is_file() else pathlib.Path(path)


def _has_trained(path: pathlib.Path) -> bool:
  """Whether anything of a run would be lost by starting over."""
  rows = read_jsonl(path / METRICS)
  return (
    any((path / CHECKPOINTS).glob("[0-9]*"))
    or any((path / name).exists() for name in (SUMMARY, MODEL))
    or any(row.get("step", 0) > 0 for row in rows)
  )


def _saved_config(path: pathlib.Path) -> tuple[ConfigDict, list[str]] | None:
  """The config of a run directory, None where it holds none of ours.

  A setting that did not exist when the run was started has its default: new
  settings cost older runs nothing.

  Returns:
    The config, and "key = value" for each such setting.
  """
  try:
    saved = config_lib.from_json((path / CONFIG).read_text())
    if "path" not in (saved.get("model") or {}):
      return None
    return config_lib.fill_in(saved, default_config())
  except (OSError, TypeError, ValueError):
    return None


def say_added(path: str | os.PathLike) -> None:
  """Says which settings are younger than a run, and what they are for it."""
  saved = _saved_config(pathlib.Path(path))
  if saved and saved[1]:
    print(f"{path} is older than these settings: {', '.join(saved[1])}")


def read_config(run: str | os.PathLike) -> ConfigDict:
  """The config of a run directory.

  Raises:
    ValueError: it has none, or one with wrong keys or values.
  """
  saved = _saved_config(pathlib.Path(run))
  if saved is None:
    raise ValueError(
      f"no run at {run}: give the run directory of a training run, the one "
      f"with its {CONFIG} and {CHECKPOINTS}/"
    )
  problems = config_lib.check_keys(
    saved[0], default_config(), WORDS
  ) or validation.problems(config_lib.flatten(saved[0]))
  if problems:
    lines = "\n  ".join(problems)
    raise ValueError(f"{pathlib.Path(run) / CONFIG} is not valid:\n  {lines}")
  return saved[0]


def check(path: str | os.PathLike, config: ConfigDict) -> bool:
  """Whether a directory can be this config's run; writes nothing.

  A run that has trained nothing yet may be taken over by a corrected config.

  Args:
    path: may be missing.
    config: the resolved config.

  Returns:
    True where the directory is a run of the same config: resume.

  Raises:
    ValueError: the directory is a run of another config, or no run directory.
  """
  path = pathlib.Path(path)
  if path.exists() and not path.is_dir():
    raise ValueError(f"{path} is a file; give a directory as --run_dir")
  saved = _saved_config(path)
  if saved is not None:
    changed = config_lib.difference(saved[0], config)
    if changed and _has_trained(path):
      raise ValueError(
        f"{path} holds a run with another config (its value -> yours):\n  "
        + "\n  ".join(changed)
        + "\ngive another --run_dir, or the run's own values to resume it"
      )
    return not changed
  # A temporary config.json is what a kill at the very start leaves.
  ours = f".{CONFIG}.tmp"
  if path.exists() and any(p.name != ours for p in path.iterdir()):
    raise ValueError(
      f"{path} is not empty and has no {CONFIG} of a run, so it is not a "
      "run: give a new or an empty directory as --run_dir"
    )
  return False


def open_run(path: str | os.PathLike, config: ConfigDict) -> bool:
  """Starts a run directory, or goes on with one of the same config.

  Args:
    path: created where it does not exist.
    config: the resolved config.

  Returns:
    As `check`, which raises what this raises.
  """
  resumed = check(path, config)
  if not resumed:
    path = pathlib.Path(path)
    shutil.rmtree(path / REFERENCE, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / CONFIG, config_lib.to_json(config))
  return resumed
