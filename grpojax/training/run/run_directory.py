"""Run directories: their files, the files' names, and whose run they hold."""

import json
import os
import pathlib
import re
import shutil
from typing import Any

from grpojax.runtime import checkpoint
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.files import bucket
from grpojax.runtime.files.records import append_jsonl, read_jsonl, write_text
from grpojax.runtime.files.run_lock import LOCK
from grpojax.training.config import to_config
from grpojax.training.run import run_config, run_storage
from grpojax.training.run.run_config import CONFIG
from grpojax.training.settings.run import TrainSettings

CHANGES = "changes.jsonl"  # settings that were changed when it was resumed
LENGTHS = "lengths.npz"  # of all prompts: they are measured once
METRICS = "metrics.jsonl"  # one row a step, and one an evaluation
SAMPLES = "samples.jsonl"  # completions with their rewards: `sample_rows`
REWARDS = "rewards.jsonl"  # how often which reward was given: `sample_rows`
EVALUATIONS = "evaluations.jsonl"  # which held-out answers were right
FAILURES = "failures.jsonl"  # rewards that could not be computed
TRACKED = "trackers.json"  # what trackers call the run
MODEL = "model"  # the trained model, in Hugging Face format
OF_MODEL = "step.json"  # in it: the step that it is of
CURVE = "learning_curve.png"
REPORT = "report.html"  # all of it, to look at in a browser
SUMMARY = "summary.json"  # written last: the run is finished

RECORDS = (METRICS, SAMPLES, REWARDS, EVALUATIONS, FAILURES)
"""Files of rows that each say their step: cut where a run is resumed."""

# Files that a kill at the very start leaves.
_TRACES = re.compile(
  rf"\.({re.escape(CONFIG)}|{re.escape(LENGTHS)})\.\w+\.tmp"
  rf"|{re.escape(LOCK)}|{re.escape(bucket.ORIGIN)}"
)


def is_run(path: str | os.PathLike) -> bool:
  """Returns True where a directory is that of a run with checkpoints."""
  return run_storage.checkpoints(path).is_dir()


def is_finished(
  path: str | os.PathLike, settings: TrainSettings | None = None
) -> bool:
  """Returns True where a run has come to its end, or to that of settings."""
  path = pathlib.Path(path)
  if not (path / SUMMARY).exists():
    return False
  run = run_config.saved(path)
  if settings is None:
    return True
  return bool(run) and not _goes_on(path, run.config, settings)


def _goes_on(path: pathlib.Path, old: Any, new: TrainSettings) -> bool:
  """Returns True where a run that finished by its old config goes on."""
  try:
    done = int(json.loads((path / SUMMARY).read_text())["steps"])
  except (KeyError, TypeError, ValueError):
    done = old.steps
  limits = {old.stop.no_improvement, new.stop.no_improvement}
  return old.steps != new.steps or (done < old.steps and len(limits) > 1)


def model_directory(path: str | os.PathLike) -> pathlib.Path:
  """Returns the directory of a finished run's model, else the path itself."""
  model = pathlib.Path(path) / MODEL
  return model if (model / "config.json").is_file() else pathlib.Path(path)


def _has_begun(path: pathlib.Path) -> bool:
  """Returns True where a run has taken a step."""
  return any(row.get("step", 0) > 0 for row in read_jsonl(path / METRICS))


def _has_ended(path: pathlib.Path) -> bool:
  """Returns True where there is anything of what a run leaves at its end."""
  return any((path / name).exists() for name in (SUMMARY, MODEL))


def _has_trained(path: pathlib.Path) -> bool:
  """Returns True where anything of a run would be lost by starting over."""
  numbered = run_storage.checkpoints(path).glob("[0-9]*")
  return any(numbered) or _has_ended(path) or _has_begun(path)


def _complete(path: str | os.PathLike) -> list[int]:
  return checkpoint.complete(run_storage.checkpoints(path))


def steps_done(path: str | os.PathLike) -> int:
  """Returns the step of the newest checkpoint, 0 where there is none."""
  return max(_complete(path), default=0)


def say_restart(path: str | os.PathLike) -> None:
  """Prints a line where a run without a checkpoint starts again at step 1."""
  path = pathlib.Path(path)
  if _has_begun(path) and not _complete(path):
    print(f"{path} has no checkpoint: it starts again at step 1", flush=True)


def check(path: str | os.PathLike, settings: TrainSettings) -> bool:
  """Checks that a directory can be this config's run; writes nothing.

  A run that has trained nothing yet may be taken over by a corrected config.

  Returns:
    True where the directory is a run to go on with: of the same config, but for
    what is `CHANGEABLE`.

  Raises:
    ValueError: the directory is a run of another config, has done more steps
      than are asked for, has lost what more steps would go on from, or is no
      run directory.
  """
  path = pathlib.Path(path)
  for folder in (path, run_storage.checkpoints(path)):
    if folder.exists() and not folder.is_dir():
      raise ValueError(f"{folder} is a file, where a directory should be")
  if run_config.saved(path) is not None:
    return _check_run(path, settings)
  if (path / CONFIG).exists() and is_run(path):
    raise ValueError(
      f"{path / CONFIG} cannot be read, and {path} has checkpoints: put the "
      "run's config back, or give another --run_dir"
    )
  if path.exists() and not all(
    _TRACES.fullmatch(x.name) for x in path.iterdir()
  ):
    raise ValueError(
      f"{path} is not empty and has no {CONFIG} of a run, so it is not a "
      "run: give a new or an empty directory as --run_dir"
    )
  return False


def _check_run(path: pathlib.Path, settings: TrainSettings) -> bool:
  """Does what `check` does where the directory holds a run."""
  may, may_not = run_config.changed(path, settings)
  trained = _has_trained(path)
  if may_not and trained:
    raise ValueError(
      f"{path} holds a run with another config (its value -> yours):\n  "
      + "\n  ".join(may_not)
      + "\ngive another --run_dir, or the run's own values to resume it"
    )
  if trained and settings.steps < steps_done(path):
    raise ValueError(
      f"--config.steps = {settings.steps}: the run in {path} has done "
      f"{steps_done(path)} already; give as many or more"
    )
  unfinished = not is_finished(path, settings)
  if unfinished and _has_ended(path) and not _complete(path):
    raise ValueError(
      f"{path} has a trained model, and no checkpoint that more steps could "
      f"go on from: put {run_storage.checkpoints(path)} back, or train "
      f"{path / MODEL} in another --run_dir "
      f"(--config.model.path={path / MODEL})"
    )
  return trained or not (may or may_not)


def open_run(path: str | os.PathLike, settings: TrainSettings) -> bool:
  """Starts a run directory, or finds the run to go on with in it.

  The directory is made where it does not exist. Returns and raises what `check`
  does; `record_changes` follows, when nothing can go wrong any more.
  """
  path, resumed = pathlib.Path(path), check(path, settings)
  if not resumed:
    run_storage.reference(path).rmtree(missing_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    (path / TRACKED).unlink(missing_ok=True)  # another run's
    write_text(path / CONFIG, config_lib.to_json(to_config(settings)))
  return resumed


def record_changes(path: str | os.PathLike, settings: TrainSettings) -> None:
  """Makes a config that differs in what may change that of the run.

  Where the number of steps differs, or what ends them early, what a finished
  run has left at its end goes away.
  """
  path = pathlib.Path(path)
  may, _ = run_config.changed(path, settings)
  more = any(re.match(r"steps:|stop\.no_improvement:", x) for x in may)
  remove_model(path, only_rest=not more)
  if may:
    row = {"after_step": steps_done(path), "changed": may}
    append_jsonl(path / CHANGES, row)
    write_text(path / CONFIG, config_lib.to_json(to_config(settings)))


def remove_model(path: str | os.PathLike, only_rest: bool = False) -> None:
  """Removes a run's model, and what an earlier removal has left of one.

  At no moment is there a part of a model by the model's name; and the summary,
  by which a run is finished, goes first. With `only_rest`, both stay.
  """
  path = pathlib.Path(path)
  rest = path / f".{MODEL}.old"
  shutil.rmtree(rest, ignore_errors=True)
  if only_rest:
    return
  (path / SUMMARY).unlink(missing_ok=True)
  if (path / MODEL).exists():
    (path / MODEL).rename(rest)
    shutil.rmtree(rest, ignore_errors=True)
