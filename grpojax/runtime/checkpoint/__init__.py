"""Checkpoints of a run, which Orbax saves in the background.

Orbax writes a checkpoint under a temporary name and renames it when complete
(on gs://, which cannot rename, it adds a file instead). So a kill during a save
never leaves an incomplete checkpoint that looks complete.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

from etils import epath
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from grpojax.core.types import Params, TrainState
from grpojax.runtime.checkpoint import stored_arrays
from grpojax.runtime.files import disk, records, run_lock
from grpojax.runtime.processes import distributed, interrupts

_ADVICE = (
  "delete that directory to resume from the checkpoint before it, or to start "
  "again if there is none"
)
_METADATA = "_CHECKPOINT_METADATA"
_POLL = 1.0  # seconds between two checks for a failed save
_logged_errors: list[BaseException] = []  # errors of the save in flight


def _is_shown(record: logging.LogRecord) -> bool:
  """Log filter: False for Orbax's warnings, and for errors that it also raises.

  Records these errors in `_logged_errors`: if one of several processes cannot
  save its part, Orbax raises the error up to 20 minutes later.
  """
  if record.name == "asyncio":  # from tasks of a failed load
    return not re.search("orbax|tensorstore", record.getMessage())
  if "orbax/checkpoint" not in record.pathname:
    return True
  is_error = record.levelno >= logging.ERROR
  if is_error and record.exc_info:
    _logged_errors.append(record.exc_info[1])
  # `_check_metadata` reports metadata that cannot be read.
  reading = "/metadata/" in record.pathname
  return is_error and not record.exc_info and not reading


for _name in ("absl", "asyncio", "root"):
  logging.getLogger(_name).addFilter(_is_shown)


def _own_error() -> BaseException | None:
  """Returns this process's first save error, if several processes save."""
  return _logged_errors[0] if _logged_errors and distributed.several() else None


def _absolute(path: str | os.PathLike) -> epath.Path:
  path = epath.Path(path)
  return path if os.fspath(path).startswith("gs://") else path.absolute()


def complete(folder: str | os.PathLike) -> list[int]:
  """Returns the steps of the complete checkpoints in a folder, ascending."""
  on_gs = os.fspath(folder).startswith("gs://")
  mark = "commit_success.txt" if on_gs else _METADATA
  names = (path.parent.name for path in epath.Path(folder).glob(f"*/{mark}"))
  return sorted(int(name) for name in names if name.isdecimal())


def _check_metadata(folder: epath.Path) -> None:
  """Raises ValueError if damaged metadata would make Orbax fail."""
  for step in complete(folder):
    path = folder / str(step)
    try:
      text = (path / _METADATA).read_bytes()
    except FileNotFoundError:  # deleted after listing
      continue
    if records.json_object(text) is None:
      reason = f"its {_METADATA} is no JSON object"
      raise ValueError(f"{path} is damaged ({reason}): {_ADVICE}")


def last_good(folder: str | os.PathLike) -> str:
  """Describes the checkpoint from which a run resumes."""
  if steps := complete(folder):
    newest = epath.Path(folder) / str(steps[-1])
    return f"the last good checkpoint is {newest}"
  run = os.path.dirname(os.path.abspath(folder))
  is_local = "://" not in os.fspath(folder)
  is_gone = is_local and not os.path.isdir(run)
  return run_lock.gone(run) if is_gone else "there is no checkpoint yet"


@dataclasses.dataclass
class Checkpointer:
  """An open directory of checkpoints, from `open_checkpointer`."""

  orbax: Any = None  # Orbax's checkpointer
  always: int | None = None  # step to keep, however old
  in_flight: Any = None  # Orbax's response to the save in the background

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    """Tells Orbax to keep step `always` (a preservation policy)."""
    del context
    return [info.step == self.always for info in checkpoints]


@contextlib.contextmanager
def open_checkpointer(
  directory: str | os.PathLike, keep: int = 2, readonly: bool = False
) -> Iterator[Checkpointer]:
  """Opens a directory with a subdirectory STEP/ for each checkpoint.

  Keeps the newest `keep` checkpoints. Leaving the context waits for the save in
  flight (Ctrl-C then ends the process at once), and raises disk.WriteFailed if
  it failed. Removes unfinished saves unless `readonly`: a running process might
  be writing them. ValueError if a checkpoint's metadata is damaged, or if
  `readonly` and the directory does not exist.
  """
  path = _absolute(directory)
  if readonly and not path.is_dir():
    raise ValueError(f"{directory} does not exist: there are no checkpoints")
  _check_metadata(path)
  training = ocp.training
  checkpointer = Checkpointer()
  newest = training.preservation_policies.LatestN(None if readonly else keep)
  checkpointer.orbax = training.Checkpointer(
    path,
    # Orbax's default policy skips a save while another is in flight.
    save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
    preservation_policy=training.preservation_policies.AnyPreservationPolicy(
      [newest, checkpointer]
    ),
    cleanup_tmp_directories=not readonly,
  )
  try:
    yield checkpointer
  finally:
    with (
      interrupts.handled(signal.SIG_DFL, signal.SIGINT),
      _save_errors(checkpointer),
    ):
      try:
        wait(checkpointer)
      finally:
        if not _own_error():  # closing would wait for all processes
          checkpointer.orbax.close()
        if not readonly:
          _remove_unfinished(checkpointer)


def _remove_unfinished(checkpointer: Checkpointer) -> None:
  # On gs:// Orbax does this itself.
  folder = pathlib.Path(checkpointer.orbax.directory)
  disk.remove_all(folder, "*.orbax-checkpoint-tmp")


@contextlib.contextmanager
def _save_errors(checkpointer: Checkpointer) -> Iterator[None]:
  """Converts all errors of a save to `disk.WriteFailed`."""
  try:
    yield
  except disk.WriteFailed:
    raise
  except Exception as error:
    interrupts.skip_cleanup_at_exit(1)  # Orbax's threads may have deadlocked
    checkpointer.in_flight = None
    if not _own_error():
      with contextlib.suppress(Exception):  # Orbax raises it once per thread
        checkpointer.orbax.wait()
    _remove_unfinished(checkpointer)
    raise disk.WriteFailed(
      f"a checkpoint could not be saved ({stored_arrays.reason(error)}); "
      f"{last_good(checkpointer.orbax.directory)}"
    ) from error


def save(
  checkpointer: Checkpointer,
  step: int,
  state: TrainState,
  notes: dict[str, Any] | None = None,
  always: int | None = None,
) -> None:
  """Saves `state` in the background, after any save still in flight.

  Copies the arrays before it returns, so the caller may donate them. Does
  nothing if the step is saved already. `notes` are JSON values for
  `read_notes`. Step `always` is kept in addition to the newest checkpoints.
  Raises disk.WriteFailed if the save cannot start, or the previous one failed.
  """
  wait(checkpointer)
  checkpointer.always = always
  if step in steps(checkpointer):
    return
  state = stored_arrays.without_keys(state)
  about = stored_arrays.describe(state, notes or {})
  _logged_errors.clear()
  with interrupts.deferred(signal.SIGINT), _save_errors(checkpointer):
    checkpointer.in_flight = checkpointer.orbax.save_async(
      int(step), state, custom_metadata=about
    )


def check(checkpointer: Checkpointer, timeout: float = 0.0) -> bool:
  """Returns True if a save in flight ended within `timeout` seconds.

  Raises disk.WriteFailed if it failed.
  """
  if not checkpointer.in_flight:
    return False
  began = time.monotonic()
  with _save_errors(checkpointer):
    if error := _own_error():
      raise error
    try:
      checkpointer.in_flight.result(timeout)
    except TimeoutError:
      if time.monotonic() - began < timeout / 2:
        raise  # Orbax's own timeout, so the save failed
      return False
  checkpointer.in_flight = None
  return True


def wait(checkpointer: Checkpointer) -> None:
  """Returns when all saves are on disk; raises like `check`."""
  while checkpointer.in_flight:
    check(checkpointer, _POLL)


def steps(checkpointer: Checkpointer) -> list[int]:
  """Returns the steps of all checkpoints and of a running save, ascending."""
  return [info.step for info in checkpointer.orbax.checkpoints]


def latest_step(checkpointer: Checkpointer) -> int | None:
  """Returns the step of the newest checkpoint, or None if there is none."""
  return max(steps(checkpointer), default=None)


def _path_of(checkpointer: Checkpointer, step: int | None) -> epath.Path:
  step = latest_step(checkpointer) if step is None else step
  saved = steps(checkpointer)
  path = epath.Path(checkpointer.orbax.directory)
  if step not in saved:
    raise ValueError(f"{path} has no checkpoint of step {step}, only {saved}")
  return path / str(step)


def read_notes(checkpointer: Checkpointer, step: int) -> dict[str, Any]:
  """Returns the notes saved with a checkpoint; ValueError if damaged."""
  return stored_arrays.read_notes(_path_of(checkpointer, step), _ADVICE)


def restore(
  checkpointer: Checkpointer, state: TrainState, step: int | None = None
) -> TrainState:
  """Loads a checkpoint, by default the newest, with the shardings of `state`.

  Leaves of `state` are arrays or `jax.ShapeDtypeStruct`s; a leaf without a
  sharding goes to the first device. The pending rollout can have another size.
  ValueError if the checkpoint is missing, damaged or does not fit `state`.
  """
  return stored_arrays.load(_path_of(checkpointer, step), state, _ADVICE)


def restore_policy(
  checkpointer: Checkpointer, params: PyTree, step: int | None = None
) -> Params:
  """Loads only a checkpoint's parameters, with the shardings of `params`."""
  path = _path_of(checkpointer, step)
  like = {"params": params}
  return stored_arrays.load(path, like, _ADVICE, partial=True)["params"]


def save_params(path: str | os.PathLike, params: Params) -> None:
  """Saves parameters unless `path` exists; may raise disk.WriteFailed."""
  path = _absolute(path)
  if distributed.on_main(path.exists):
    return
  try:
    ocp.save(path, params, custom_metadata=stored_arrays.describe(params))
  except Exception as error:
    raise disk.WriteFailed(
      f"{path} could not be saved ({stored_arrays.reason(error)})"
    ) from error


def restore_params(path: str | os.PathLike, params: PyTree) -> Params:
  """Loads parameters from `save_params`, with the shardings of `params`."""
  advice = "delete that directory: the same command writes it again"
  return stored_arrays.load(_absolute(path), params, advice)
