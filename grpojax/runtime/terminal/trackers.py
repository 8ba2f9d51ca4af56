"""Experiment trackers, which get a copy of a run's metrics.

A tracker is a function that opens a run: one of `TRACKERS`, or a user's. Its
environment variables choose server and account (WANDB_MODE=offline needs no
network). If a tracker fails during a run, the run continues without it.
"""

import contextlib
import importlib.util
import math
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.runtime.processes import user_calls
from grpojax.runtime.terminal.screen import printable

TENSORBOARD = "tensorboard"


class TrackedRun(NamedTuple):
  """A run to open in a tracker."""

  directory: pathlib.Path
  name: str  # display name
  config: Mapping[str, Any]  # settings by dotted path
  step: int = -1  # of the checkpoint to resume from; -1 for a new run
  id: str = ""  # the tracker's id, if the run is resumed


class Tracker(NamedTuple):
  """An open run of a tracker."""

  log: Callable[[int, Mapping[str, float]], None]  # `(step, numbers)`
  close: Callable[[], None]  # flushes
  id: str = ""  # the tracker's id of the run, if it needs one to resume


def tensorboard(run: TrackedRun) -> Tracker:
  """Logs to TensorBoard files; steps repeated by a resumed run show only once.

  Avoids SummaryWriter, which hangs on a full disk.
  """
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.summary import scalar

  directory = run.directory / TENSORBOARD
  directory.mkdir(parents=True, exist_ok=True)
  writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")

  def write(step, **content):
    writer.write_event(Event(wall_time=time.time(), step=step, **content))

  write(run.step + 1, session_log=SessionLog(status=SessionLog.START))
  writer.flush()

  def log(step, numbers):
    for name, value in numbers.items():
      write(step, summary=scalar(name, value))
    writer.flush()

  def close():
    with contextlib.suppress(OSError):  # a full disk, which `log` reports
      writer.close()

  return Tracker(log, close)


def wandb(run: TrackedRun) -> Tracker:
  """Logs to Weights & Biases (set WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY).

  The x-axis of all curves is "step". A resumed run's repeated steps show twice.
  """
  import wandb as library

  opened = library.init(
    project=os.environ.get("WANDB_PROJECT", "grpojax"),
    name=run.name,
    id=run.id or secrets.token_hex(8),
    resume="allow",
    dir=str(run.directory),
    config=dict(run.config),
    settings=library.Settings(console="off", silent=True),
  )
  opened.define_metric("*", step_metric="step")

  def log(step, numbers):
    opened.log({"step": step, **numbers})

  return Tracker(log, opened.finish, opened.id)


# Functions that open a run, by the tracker's name.
TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
  TENSORBOARD: tensorboard,
  "wandb": wandb,
}


def opener(name: str) -> Callable[[TrackedRun], Tracker]:
  """Returns the function that opens runs, from `TRACKERS` or user code.

  ValueError if the function is unknown, or wandb is not installed.
  """
  setting = f"log.trackers = {name!r}"
  if name == "wandb" and importlib.util.find_spec(name) is None:
    raise ValueError(
      f"{setting}: wandb is not installed: pip install 'grpojax[wandb]'"
    )
  if name in TRACKERS:
    return TRACKERS[name]
  open_run = user_calls.load(setting, name, TRACKERS)
  if not callable(open_run):
    raise ValueError(f"{setting} is not a function: {open_run!r:.80}")
  return open_run


def open_all(
  names: Sequence[str], run: TrackedRun, ids: Mapping[str, str]
) -> tuple[dict[str, Tracker], dict[str, str]]:
  """Opens a run in all trackers; returns open trackers and run ids by name.

  `ids` are the ids of a resumed run, by tracker. If a tracker fails, closes the
  others and raises ValueError.
  """
  opened: dict[str, Tracker] = {}
  try:
    for name in names:
      opened[name] = opener(name)(run._replace(id=ids.get(name, "")))
  except (Exception, SystemExit) as error:
    close_all(opened)
    hint = " (WANDB_MODE=offline needs no account)" if name == "wandb" else ""
    raise ValueError(
      f"log.trackers: {name} does not open: {_one_line(error)}{hint}; without"
      f" it: --config.log.trackers={','.join(x for x in names if x != name)}"
    ) from error
  return opened, {name: x.id for name, x in opened.items() if x.id}


def log_all(opened: dict, step: int, row: Mapping[str, Any]) -> None:
  """Logs a row's finite numbers; reports and removes failing trackers."""
  numbers = {}
  for name, value in row.items():
    if name == "step" or isinstance(value, bool | str):
      continue
    with contextlib.suppress(TypeError, ValueError):  # not a number
      if math.isfinite(number := float(value)):
        numbers[name] = number
  for name, tracker in list(opened.items()):
    try:
      tracker.log(step, numbers)
    except (Exception, SystemExit) as error:
      del opened[name]
      print(
        f"step {step}: {name} fails ({_one_line(error)}); it is off until the"
        " run is resumed",
        flush=True,
      )


def close_all(opened: Mapping[str, Tracker]) -> None:
  """Closes all trackers, and prints their errors."""
  for name, tracker in opened.items():
    try:
      tracker.close()
    except (Exception, SystemExit) as error:
      print(f"{name} does not close: {_one_line(error)}", flush=True)


def _one_line(error: BaseException) -> str:
  # An error may quote an address with a password.
  text = " ".join(re.sub(r"://[^/\s@]*@", "://...@", str(error)).split())
  text = printable(text[:300])
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
