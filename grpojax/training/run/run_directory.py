"""Run directories: their files, whose run they hold, and how it may go on."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import time
from typing import NamedTuple

from ml_collections import ConfigDict

from grpojax.runtime import checkpoint
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.files import records
from grpojax.runtime.files.run_lock import LOCK
from grpojax.training.config import SETTINGS, from_config, to_config
from grpojax.training.run import run_storage
from grpojax.training.settings.run import TrainSettings

# The files; `grpojax.train` says what is in them.
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
OF_MODEL = "step.json"  # in the model's directory: its step
CURVE = "learning_curve.png"
REPORT = "report.html"
SUMMARY = "summary.json"  # written last: the run is finished

RECORDS = (METRICS, SAMPLES, REWARDS, EVALUATIONS, FAILURES)
"""Files of rows with a step, which are cut when a run is resumed."""

CHANGEABLE = (
  r"steps|log\..*|eval\..*|checkpoint\..*|stop\..*|profile\..*|data\.too_long|"
  r"(reward|environment)\.(workers|timeout)|mesh\..*|environment\.check|"
  r"optim\.(micro_batches|packing)|model\.(remat|attention|reference)|"
  r"sampling\.(stages|compact|parts)|allow_changed_inputs"
)
"""Settings that may change when a run is resumed: they leave its past alone."""

DATE = "date_string"  # of data.template_options

_REPLACED = (CONFIG, LENGTHS, TRACKED, CURVE, REPORT, SUMMARY, *RECORDS)
"""Files that are written by a temporary name."""

# Files that a kill at the very start leaves.
_TRACES = re.compile(
  rf"\.({re.escape(CONFIG)}|{re.escape(LENGTHS)})\.\w+\.tmp"
  rf"|{re.escape(LOCK)}|{re.escape(run_storage.ORIGIN)}"
)

Path = str | os.PathLike


# The config of a run.


class SavedConfig(NamedTuple):
  """The config of a run, with the defaults of settings younger than it."""

  config: ConfigDict
  added: list[str]  # lines "key = value" of those settings


def saved(path: Path) -> SavedConfig | None:
  """Reads the config of a run directory; None without a run's config."""
  try:
    config = config_lib.from_json((pathlib.Path(path) / CONFIG).read_text())
    if "path" not in (config.get("model") or {}):
      return None
    return SavedConfig(*settings_lib.fill_in(config, SETTINGS))
  except (OSError, TypeError, ValueError):
    return None


def say_added(path: Path) -> None:
  """Prints the settings that are younger than a run, with their values."""
  run = saved(path)
  if run and run.added:
    print(f"{path} is older than these settings: {', '.join(run.added)}")


def read_config(path: Path) -> ConfigDict:
  """Returns the config of a run directory; ValueError without a valid one."""
  run = saved(path)
  if run is None:
    raise ValueError(
      f"no run at {path}: give the run directory of a training run, the one "
      f"with its {CONFIG} and {run_storage.CHECKPOINTS}/"
    )
  try:
    from_config(run.config)
  except ValueError as error:
    raise ValueError(f"{pathlib.Path(path) / CONFIG}: {error}") from None
  return run.config


def write_config(path: Path, settings: TrainSettings) -> None:
  """Writes the settings of a run."""
  text = config_lib.to_json(to_config(settings))
  records.write_text(pathlib.Path(path) / CONFIG, text)


def changed(path: Path, settings: TrainSettings) -> tuple[list[str], list[str]]:
  """Compares settings with those that a run was started with.

  Returns allowed changes and others, as lines "key: its value -> yours".
  """
  run = saved(path)
  if not run:
    return [], []
  lines = config_lib.difference(run.config, to_config(settings))
  if settings_lib.key_errors(SETTINGS, run.config):
    return [], lines  # no run of ours has written that
  may = [x for x in lines if re.match(rf"({CHANGEABLE}): ", x)]
  return may, [x for x in lines if x not in may]


def with_found(
  settings: TrainSettings, date: str | None = None, prompt_length: int = 0
) -> TrainSettings:
  """Adds a run's date and its longest prompt, unless the settings have them."""
  data = settings.data
  if date is not None and DATE not in data.template_options:
    options = data.template_options | {DATE: date}
    data = dataclasses.replace(data, template_options=options)
  length = data.max_prompt_length or prompt_length
  data = dataclasses.replace(data, max_prompt_length=length)
  return dataclasses.replace(settings, data=data)


# The progress of a run.


def is_run(path: Path) -> bool:
  """Returns True for the directory of a run with checkpoints."""
  return run_storage.checkpoints(path).is_dir()


def model_directory(path: Path) -> pathlib.Path:
  """Returns the directory of a finished run's model, else the path itself."""
  model = pathlib.Path(path) / MODEL
  return model if (model / "config.json").is_file() else pathlib.Path(path)


def is_finished(path: Path, settings: TrainSettings | None = None) -> bool:
  """Returns True if a run has come to its end, or to that of settings."""
  try:
    done = json.loads((pathlib.Path(path) / SUMMARY).read_bytes())["steps"]
  except (KeyError, OSError, RecursionError, TypeError, ValueError):
    return False  # there is none, or it is damaged and will be written again
  if settings is None or not isinstance(done, int):
    return isinstance(done, int)
  run = saved(path)
  if run is None or run.config.steps != settings.steps:
    return False
  before, new = run.config.stop.no_improvement, settings.stop.no_improvement
  return done >= settings.steps or before == new


def _has_ended(path: pathlib.Path) -> bool:
  return any((path / name).exists() for name in (SUMMARY, MODEL))


def has_begun(path: pathlib.Path) -> bool:
  """Returns True if a run has taken a step."""
  saved_any = any(run_storage.checkpoints(path).glob("[0-9]*"))
  taken = any(
    row.get("step", 0) > 0 for row in records.read_jsonl(path / METRICS)
  )
  return _has_ended(path) or saved_any or taken


def say_restart(path: Path) -> None:
  """Prints a line if a run without a checkpoint starts again at step 1."""
  complete = checkpoint.complete(run_storage.checkpoints(path))
  if has_begun(pathlib.Path(path)) and not complete:
    print(f"{path} has no checkpoint: it starts again at step 1", flush=True)


# Opening, and changes.


def check(path: Path, settings: TrainSettings) -> bool:
  """Checks that a directory can be this config's run; writes nothing.

  Returns True for a run to resume, whose config differs at most in `CHANGEABLE`
  settings. One that has not trained may get any config. ValueError for a run of
  another config, of more steps or without checkpoints, and for other files.
  """
  path = pathlib.Path(path)
  checkpoints = run_storage.checkpoints(path)
  for folder in (path, checkpoints):
    if folder.exists() and not folder.is_dir():
      raise ValueError(f"{folder} is a file, where a directory should be")
  if saved(path) is None:
    _check_other(path)
    return False
  may, may_not = changed(path, settings)
  ended, trained = _has_ended(path), has_begun(path)
  complete = checkpoint.complete(checkpoints)
  if may_not and trained:
    raise ValueError(
      f"{path} holds a run with another config (its value -> yours):\n  "
      + "\n  ".join(may_not)
      + "\ngive another --run_dir, or the run's own values to resume it"
    )
  if settings.steps < max(complete, default=0):
    raise ValueError(
      f"--config.steps = {settings.steps}: the run in {path} has done "
      f"{max(complete)} already; give as many or more"
    )
  if ended and not complete and not is_finished(path, settings):
    raise ValueError(
      f"{path} has a trained model, and no checkpoint that more steps could "
      f"go on from: put {checkpoints} back, or train {path / MODEL} in another "
      f"--run_dir (--config.model.path={path / MODEL})"
    )
  return trained or not (may or may_not)


def _check_other(path: pathlib.Path) -> None:
  """Refuses a directory without a config of a run, but for an empty one."""
  if (path / CONFIG).exists() and is_run(path):
    raise ValueError(
      f"{path / CONFIG} cannot be read, and {path} has checkpoints: put the "
      "run's config back, or give another --run_dir"
    )
  files = path.iterdir() if path.exists() else ()
  if not all(_TRACES.fullmatch(file.name) for file in files):
    raise ValueError(
      f"{path} is not empty and has no {CONFIG} of a run, so it is not a "
      "run: give a new or an empty directory as --run_dir"
    )


def open_run(path: Path, settings: TrainSettings) -> bool:
  """Makes or opens a run directory; returns and raises like `check`.

  `record_changes` follows when nothing can go wrong any more.
  """
  path, resumed = pathlib.Path(path), check(path, settings)
  own_files(path)
  if not resumed:
    run_storage.reference(path).rmtree(missing_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    (path / TRACKED).unlink(missing_ok=True)  # another run's
    write_config(path, settings)
  return resumed


def own_files(path: Path) -> None:
  """Replaces links among a run's files by copies; their targets stay."""
  for name in (*_REPLACED, CHANGES):
    file = pathlib.Path(path) / name
    if file.is_file() and file.is_symlink():
      with records.temporary(file) as copy:
        shutil.copyfile(file, copy)
        os.replace(copy, file)
    elif file.is_symlink():
      file.unlink()


def remove_torn(path: Path) -> None:
  """Removes temporary files of killed writers; the run's lock must be held.

  Other programs write reports too: a report of the last minute stays.
  """
  for file in pathlib.Path(path).iterdir():
    of = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", file.name)
    if of and of[1] in _REPLACED:
      with contextlib.suppress(FileNotFoundError):
        if of[1] != REPORT or abs(time.time() - file.stat().st_mtime) > 60:
          file.unlink()


def record_changes(path: Path, settings: TrainSettings) -> list[str]:
  """Writes changed settings, and returns their lines.

  Other `steps` or `stop.no_improvement` remove a run's summary and model.
  """
  path = pathlib.Path(path)
  may, _ = changed(path, settings)
  more = any(re.match(r"steps:|stop\.no_improvement:", x) for x in may)
  remove_model(path, only_rest=not more)
  if may:
    steps = checkpoint.complete(run_storage.checkpoints(path))
    row = {"after_step": max(steps, default=0), "changed": may}
    records.append_jsonl(path / CHANGES, row)
    write_config(path, settings)
  return may


def remove_model(path: Path, only_rest: bool = False) -> None:
  """Removes a run's model, and the rest of an earlier removal.

  The summary, which marks a finished run, goes first; the model is renamed, so
  that it is never incomplete. With `only_rest` both stay.
  """
  path = pathlib.Path(path)
  rest = path / f".{MODEL}.old"

  def remove_rest():
    if rest.is_symlink() or rest.is_file():  # somebody keeps it elsewhere
      rest.unlink()
    shutil.rmtree(rest, ignore_errors=True)

  remove_rest()
  if only_rest:
    return
  (path / SUMMARY).unlink(missing_ok=True)
  if os.path.lexists(path / MODEL):
    (path / MODEL).rename(rest)
    remove_rest()
