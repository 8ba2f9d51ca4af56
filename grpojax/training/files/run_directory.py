"""Run directories: their files, and the conditions for resuming a run."""

import contextlib
import os
import pathlib
import re
import shutil
import time
from typing import NamedTuple

from ml_collections import ConfigDict

from grpojax.runtime import checkpoint
from grpojax.runtime.cli import configs
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.files import records, run_storage
from grpojax.runtime.files.run_lock import LOCK
from grpojax.training.config import SETTINGS, from_config, to_config
from grpojax.training.settings.run import TrainSettings

# File names; `grpojax.train` documents the contents.
CONFIG = "config.json"
CHANGES = "changes.jsonl"
LENGTHS = "lengths.npz"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
REWARDS = "rewards.jsonl"
EVALUATIONS = "evaluations.jsonl"
FAILURES = "failures.jsonl"
TRACKED = "trackers.json"
MODEL = "model"
MODEL_STEP = "step.json"  # in MODEL: the step of its weights
REPORT = "report.html"
SUMMARY = "summary.json"  # written last, marks a finished run

RECORDS = (METRICS, SAMPLES, REWARDS, EVALUATIONS, FAILURES)
"""Files with rows per step; a resumed run removes the rows of lost steps."""

CHANGEABLE = (
  r"steps|log\..*|eval\..*|checkpoint\..*|stop\..*|profile\..*|data\.too_long|"
  r"(reward|environment)\.(workers|timeout)|mesh\..*|environment\.check|"
  r"optim\.(micro_batches|packing)|model\.(remat|attention|reference)|"
  r"sampling\.(parts|engine\w*)|logits_chunk|allow_changed_inputs"
)
"""Settings that may change when a run is resumed."""

_REPLACED = (CONFIG, LENGTHS, TRACKED, REPORT, SUMMARY, *RECORDS)
"""Files written under a temporary name first."""

# Files that a run leaves if it is killed during its start.
_TRACES = re.compile(
  rf"\.({re.escape(CONFIG)}|{re.escape(LENGTHS)})\.\w+\.tmp"
  rf"|{re.escape(LOCK)}|{re.escape(run_storage.ORIGIN)}"
)

# Config.


class SavedConfig(NamedTuple):
  """The config of a run, with defaults for settings added to grpojax since."""

  config: ConfigDict
  added: list[str]  # lines "key = value" of added settings


def saved(path: pathlib.Path) -> SavedConfig | None:
  """Reads the config of a run directory; None if there is no valid one."""
  try:
    config = configs.from_json((path / CONFIG).read_text())
    if "path" not in (config.get("model") or {}):
      return None
    return SavedConfig(*settings_lib.fill_in(config, SETTINGS))
  except (OSError, TypeError, ValueError):
    return None


def say_added(path: pathlib.Path) -> None:
  """Prints the settings added since a run started, with their defaults."""
  run = saved(path)
  if run and run.added:
    print(f"{path} lacks settings, which get defaults: {', '.join(run.added)}")


def read_config(path: pathlib.Path) -> ConfigDict:
  """Returns a run directory's config; ValueError if there is no valid one."""
  run = saved(path)
  if run is None:
    raise ValueError(
      f"no run at {path}: give the directory of a training run, with its "
      f"{CONFIG} and {run_storage.CHECKPOINTS}/"
    )
  try:
    from_config(run.config)
  except ValueError as error:
    raise ValueError(f"{path / CONFIG}: {error}") from None
  return run.config


def write_config(path: pathlib.Path, settings: TrainSettings) -> None:
  """Writes the settings of a run to its config.json."""
  text = configs.to_json(to_config(settings))
  records.write_text(path / CONFIG, text)


def changed(
  path: pathlib.Path, settings: TrainSettings
) -> tuple[list[str], list[str]]:
  """Returns allowed and forbidden changes, as lines "key: old -> new"."""
  run = saved(path)
  if not run:
    return [], []
  lines = configs.difference(run.config, to_config(settings))
  if settings_lib.key_errors(SETTINGS, run.config):
    return [], lines  # the file is invalid
  allowed = [x for x in lines if re.match(rf"({CHANGEABLE}): ", x)]
  return allowed, [x for x in lines if x not in allowed]


# Progress.


def is_run(path: pathlib.Path) -> bool:
  """Returns True for a run directory with checkpoints."""
  return run_storage.checkpoints(path).is_dir()


def model_directory(path: pathlib.Path) -> pathlib.Path:
  """Returns the model's directory in a finished run, else the path itself."""
  model = path / MODEL
  return model if (model / "config.json").is_file() else path


def is_finished(
  path: pathlib.Path, settings: TrainSettings | None = None
) -> bool:
  """Returns True if a run is finished and `settings` do not extend it."""
  try:
    summary = records.json_object((path / SUMMARY).read_bytes())
  except OSError:
    summary = None
  done = (summary or {}).get("steps")
  if not isinstance(done, int):
    return False  # a damaged summary will be written again
  if settings is None:
    return True
  run = saved(path)
  if run is None or run.config.steps != settings.steps:
    return False
  before = run.config.stop.no_improvement
  new = settings.stop.no_improvement
  return done >= settings.steps or before == new


def _has_ended(path: pathlib.Path) -> bool:
  return any((path / name).exists() for name in (SUMMARY, MODEL))


def has_begun(path: pathlib.Path) -> bool:
  """Returns True if a run has completed a step."""
  return (
    _has_ended(path)
    or any(run_storage.checkpoints(path).glob("[0-9]*"))
    or any(row.get("step", 0) > 0 for row in records.read_jsonl(path / METRICS))
  )


def say_restart(path: pathlib.Path) -> None:
  """Prints a line if a run without a checkpoint starts again at step 1."""
  complete = checkpoint.complete(run_storage.checkpoints(path))
  if has_begun(path) and not complete:
    print(f"{path} has no checkpoint: it starts again at step 1", flush=True)


# Opening, and changes.


def check(path: pathlib.Path, settings: TrainSettings) -> bool:
  """Checks whether a directory can hold a run with these settings.

  Writes nothing. Returns True for a run to resume. Only `CHANGEABLE` settings
  may differ from its config, except before its first step. ValueError for other
  changes, fewer steps, lost checkpoints, or files that belong to no run.
  """
  checkpoints = run_storage.checkpoints(path)
  for folder in (path, checkpoints):
    if folder.exists() and not folder.is_dir():
      raise ValueError(f"{folder} is a file, not a directory")
  if saved(path) is None:
    _check_unused(path)
    return False
  allowed, forbidden = changed(path, settings)
  trained = has_begun(path)
  complete = checkpoint.complete(checkpoints)
  if forbidden and trained:
    raise ValueError(
      f"{path} holds a run with another config (its value -> yours):\n  "
      + "\n  ".join(forbidden)
      + "\ngive another --run_dir, or the values of the run to resume it"
    )
  if settings.steps < max(complete, default=0):
    raise ValueError(
      f"--config.steps = {settings.steps}: the run in {path} has completed "
      f"{max(complete)} steps: give at least as many"
    )
  if _has_ended(path) and not complete and not is_finished(path, settings):
    raise ValueError(
      f"{path} has a trained model, but no checkpoint to resume from: restore "
      f"{checkpoints}, or train {path / MODEL} in another --run_dir "
      f"(--config.model.path={path / MODEL})"
    )
  return trained or not (allowed or forbidden)


def _check_unused(path: pathlib.Path) -> None:
  """Raises ValueError if a directory without a valid config has other files."""
  if (path / CONFIG).exists() and is_run(path):
    raise ValueError(
      f"{path / CONFIG} cannot be read, but {path} has checkpoints: restore "
      "the run's config, or give another --run_dir"
    )
  files = path.iterdir() if path.exists() else ()
  if not all(_TRACES.fullmatch(file.name) for file in files):
    raise ValueError(
      f"{path} is not empty and has no {CONFIG} of a run: give a new or an "
      "empty directory as --run_dir"
    )


def open_run(path: pathlib.Path, settings: TrainSettings) -> bool:
  """Creates or opens a run directory; returns and raises like `check`.

  The caller records changed settings (`record_changes`) after all checks.
  """
  resumed = check(path, settings)
  own_files(path)
  if not resumed:
    run_storage.reference(path).rmtree(missing_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    (path / TRACKED).unlink(missing_ok=True)  # from another run
    write_config(path, settings)
  return resumed


def own_files(path: pathlib.Path) -> None:
  """Replaces symbolic links to a run's files by copies of their targets."""
  for name in (*_REPLACED, CHANGES):
    file = path / name
    if file.is_file() and file.is_symlink():
      with records.temporary(file) as copy:
        shutil.copyfile(file, copy)
        os.replace(copy, file)
    elif file.is_symlink():
      file.unlink()


def remove_torn(path: pathlib.Path) -> None:
  """Removes temporary files of killed processes; needs the run's lock.

  Recent reports stay, because other programs may still be writing them.
  """
  for file in path.iterdir():
    name = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", file.name)
    if name and name[1] in _REPLACED:
      with contextlib.suppress(FileNotFoundError):
        if name[1] != REPORT or abs(time.time() - file.stat().st_mtime) > 60:
          file.unlink()


def record_changes(path: pathlib.Path, settings: TrainSettings) -> list[str]:
  """Records changed settings and returns them as lines.

  A new value of `steps` or `stop.no_improvement` removes summary and model.
  """
  lines, _ = changed(path, settings)
  goes_on = any(re.match(r"steps:|stop\.no_improvement:", x) for x in lines)
  remove_model(path, only_rest=not goes_on)
  if lines:
    steps = checkpoint.complete(run_storage.checkpoints(path))
    row = {"after_step": max(steps, default=0), "changed": lines}
    records.append_jsonl(path / CHANGES, row)
    write_config(path, settings)
  return lines


def remove_model(path: pathlib.Path, only_rest: bool = False) -> None:
  """Removes a run's summary, then its model.

  The model is renamed first, so that it is never incomplete. `only_rest` only
  completes an interrupted removal.
  """
  renamed = path / f".{MODEL}.old"

  def remove_renamed():
    if renamed.is_symlink() or renamed.is_file():  # rmtree refuses links
      renamed.unlink()
    shutil.rmtree(renamed, ignore_errors=True)

  remove_renamed()
  if only_rest:
    return
  (path / SUMMARY).unlink(missing_ok=True)
  if os.path.lexists(path / MODEL):
    (path / MODEL).rename(renamed)
    remove_renamed()
