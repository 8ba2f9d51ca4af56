"""A run in experiment trackers: opened by one process, gone on with, closed."""

import contextlib
import functools
import json

from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.files import records
from grpojax.runtime.processes import distributed
from grpojax.runtime.terminal import trackers
from grpojax.training.config import to_config
from grpojax.training.run import run_directory
from grpojax.training.run.start import Run


def _ids(run: Run) -> dict[str, str]:
  """Reads the run's ids by the trackers' names; ValueError if damaged."""
  file = run.file(run_directory.TRACKED)
  if not file.exists():
    return {}
  try:
    return {str(k): str(v) for k, v in json.loads(file.read_text()).items()}
  except (AttributeError, ValueError) as error:
    raise ValueError(
      f"{file} cannot be read: remove it, and trackers start the run anew"
    ) from error


def tracked(run: Run, step: int, stack: contextlib.ExitStack) -> Run:
  """Opens a run's trackers, in the first process alone; the stack closes them.

  `step` is that of the checkpoint that the run goes on from, or -1.

  Raises:
    ValueError: in all processes, where one does not open.
  """
  settings = run.settings
  opened: dict[str, trackers.Tracker] = {}

  def open_here() -> None:
    ids = _ids(run)
    tracked_run = trackers.TrackedRun(
      run.directory,
      settings.name,
      config_lib.flatten(to_config(settings)),
      step,
    )
    own, new = trackers.open_all(settings.log.trackers, tracked_run, ids)
    opened.update(own)
    if new != ids and new:
      records.write_json(run.file(run_directory.TRACKED), ids | new)

  distributed.on_main(open_here)
  stack.callback(trackers.close_all, opened)
  return run._replace(track=functools.partial(trackers.log_all, opened))
