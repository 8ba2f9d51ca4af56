"""Checkpoints by Orbax, saved in the background.

Orbax writes each checkpoint under a temporary name and renames it when it is
complete, so a process that is killed leaves nothing that looks like one.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from grpojax.core.types import Params, TrainState
from grpojax.runtime import (
  checkpoint_files,
  disk,
  distributed,
  interrupts,
  orbax_log,
  stored_arrays,
)


class Checkpointer(NamedTuple):
  """An open directory of checkpoints; made by `open_checkpointer`.

  Attributes:
    orbax: writes, lists and deletes them.
    in_flight: the save in the background, where there is one.
    always: steps that stay, however old they are.
  """

  orbax: ocp.training.Checkpointer
  in_flight: list[Any]
  always: list[int]


class _Always:
  """Orbax's policy for the steps of a list that changes; a class for Orbax."""

  def __init__(self, steps: list[int]):
    self._steps = steps

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    del context
    return [info.step in self._steps for info in checkpoints]


@contextlib.contextmanager
def open_checkpointer(
  directory: str | os.PathLike, keep: int = 2, readonly: bool = False
) -> Iterator[Checkpointer]:
  """Opens a directory of checkpoints, STEP/ each, as a context manager.

  Leaving its context waits for the save in flight. Ctrl-C then ends the process
  at once; the unfinished save is removed when the directory is next opened.

  Args:
    directory: of the checkpoints.
    keep: how many of the newest checkpoints stay on disk.
    readonly: for looking into a run that may be training: leave alone the
      temporary directory of a save in flight.

  Yields:
    What the functions of this module take.

  Raises:
    ValueError: `readonly`, and there are no checkpoints.
    disk.WriteFailed: on leaving, see `wait`.
  """
  path = checkpoint_files.absolute(directory)
  save_policies = ocp.training.save_decision_policies
  keep_policies = ocp.training.preservation_policies
  if readonly and not path.is_dir():
    raise ValueError(f"{directory} does not exist: there are no checkpoints")
  always = []
  newest = keep_policies.LatestN(None if readonly else keep)
  orbax = ocp.training.Checkpointer(
    path,
    # Whoever calls `save` means it. Orbax's default policy skips a save while
    # another is in flight.
    save_decision_policy=save_policies.FixedIntervalPolicy(1),
    preservation_policy=keep_policies.AnyPreservationPolicy(
      [newest, _Always(always)]
    ),
    cleanup_tmp_directories=not readonly,
  )
  checkpointer = Checkpointer(orbax, [], always)
  try:
    yield checkpointer
  finally:
    with interrupts.on_ctrl_c(signal.SIG_DFL), _failures(checkpointer):
      try:
        wait(checkpointer)
      finally:
        if not orbax_log.failed_alone():  # it would wait for all processes
          orbax.close()
        if not readonly:
          checkpoint_files.remove_torn(path)


@contextlib.contextmanager
def _failures(checkpointer: Checkpointer) -> Iterator[None]:
  """Whatever goes wrong in a save, as `disk.WriteFailed`."""
  try:
    yield
  except disk.WriteFailed:
    raise
  except Exception as error:
    interrupts.skip_end(1)
    folder = checkpointer.orbax.directory
    checkpoint_files.remove_torn(folder)
    raise disk.WriteFailed(
      f"a checkpoint could not be saved ({stored_arrays.innermost(error)}); "
      f"{checkpoint_files.last_good(folder)}"
    ) from error


def save(
  checkpointer: Checkpointer,
  step: int,
  state: TrainState,
  notes: dict[str, Any] | None = None,
  always: int | None = None,
) -> None:
  """Saves `state` in the background, after any save still in flight.

  The arrays are copied before this returns, so they may be donated at once.
  A step that is on disk already is left as it is.

  Args:
    checkpointer: from `open_checkpointer`.
    step: GRPO steps done; names the checkpoint.
    state: typed random keys are stored as their data.
    notes: JSON values to keep with it, see `read_notes`.
    always: a step whose checkpoint stays beside the newest ones.

  Raises:
    disk.WriteFailed: this save could not be begun, or the one before it failed.
  """
  wait(checkpointer)
  orbax, in_flight, kept = checkpointer
  kept[:] = [] if always is None else [always]
  if step in steps(checkpointer):
    return
  state = stored_arrays.plain(state)
  known = stored_arrays.describe(state) | stored_arrays.sealed(notes or {})
  orbax_log.forget()
  with interrupts.deferred(signal.SIGINT), _failures(checkpointer):
    in_flight.append(orbax.save_async(int(step), state, custom_metadata=known))


def read_notes(checkpointer: Checkpointer, step: int) -> dict[str, Any]:
  """What `save` was given to keep with a state.

  Raises:
    ValueError: there is no such checkpoint, or it is damaged.
  """
  return stored_arrays.read_notes(_find(checkpointer, step), _GO_BACK)


def wait(checkpointer: Checkpointer, timeout: float | None = None) -> None:
  """Returns when all saves are on disk.

  Args:
    checkpointer: from `open_checkpointer`.
    timeout: return after so many seconds in any case.

  Raises:
    disk.WriteFailed: the save that was in flight has failed.
  """
  if not checkpointer.in_flight:
    return
  (save,) = checkpointer.in_flight
  with _failures(checkpointer):
    try:
      orbax_log.result(save, timeout)
    except TimeoutError:
      if timeout is None:
        raise
      return
    except Exception:
      checkpointer.in_flight.clear()
      if not orbax_log.failed_alone():
        with contextlib.suppress(Exception):  # it says so to each thread once
          checkpointer.orbax.wait()
      raise
  checkpointer.in_flight.clear()


def check(checkpointer: Checkpointer) -> bool:
  """Whether the save in flight has just come to its end; returns at once.

  Raises:
    disk.WriteFailed: it has failed.
  """
  flying = bool(checkpointer.in_flight)
  wait(checkpointer, timeout=0.0)
  return flying and not checkpointer.in_flight


def steps(checkpointer: Checkpointer) -> list[int]:
  """Steps of all checkpoints, ascending; one in flight counts."""
  return [done.step for done in checkpointer.orbax.checkpoints]


def latest_step(checkpointer: Checkpointer) -> int | None:
  """Step of the newest checkpoint, or None."""
  return max(steps(checkpointer), default=None)


def _find(checkpointer: Checkpointer, step: int | None) -> epath.Path:
  """Where a checkpoint lies, by default the newest."""
  step = latest_step(checkpointer) if step is None else step
  folder, found = checkpointer.orbax.directory, steps(checkpointer)
  if step not in found:
    raise ValueError(f"{folder} has no checkpoint of step {step}, only {found}")
  return epath.Path(folder) / str(step)


_GO_BACK = "delete that directory to go back to the checkpoint before it"


def restore(
  checkpointer: Checkpointer,
  state: TrainState,
  step: int | None = None,
) -> TrainState:
  """Loads a checkpoint.

  Args:
    checkpointer: from `open_checkpointer`.
    state: says what to load and where to: arrays, or `jax.ShapeDtypeStruct`s
      with shardings (without one, the first device).
    step: default the newest.

  Returns:
    A state of the same structure, shapes, dtypes and shardings.

  Raises:
    ValueError: there is no such checkpoint, it is damaged, or it is of another
      model or optimizer.
  """
  path = _find(checkpointer, step)
  loaded = stored_arrays.load(path, stored_arrays.abstract(state), _GO_BACK)
  return stored_arrays.with_keys(loaded, state)


def restore_policy(
  checkpointer: Checkpointer,
  params: PyTree,
  step: int | None = None,
) -> Params:
  """Loads a checkpoint's parameters, and nothing else of it.

  Args:
    checkpointer: from `open_checkpointer`.
    params: as `state` in `restore`.
    step: default the newest.

  Raises:
    ValueError: as `restore`.
  """
  path = _find(checkpointer, step)
  like = stored_arrays.abstract(params)
  return stored_arrays.load(path, like, _GO_BACK, "params")


def save_params(path: str | os.PathLike, params: Params) -> None:
  """Saves parameters alone, unless they are there already.

  Raises:
    disk.WriteFailed: they could not be written.
  """
  path = checkpoint_files.absolute(path)
  if distributed.on_main(path.exists):
    return
  try:
    ocp.save(path, params, custom_metadata=stored_arrays.describe(params))
  except Exception as error:
    raise disk.WriteFailed(
      f"{path} could not be saved ({stored_arrays.innermost(error)})"
    ) from error


def restore_params(path: str | os.PathLike, params: PyTree) -> Params:
  """Loads what `save_params` saved onto abstract or concrete `params`.

  Raises:
    ValueError: there is nothing, it is damaged, or it does not fit.
  """
  path = checkpoint_files.absolute(path)
  if not path.exists():
    raise ValueError(f"{path} does not exist: save_params comes first")
  again = "delete that directory: the same command writes it again"
  return stored_arrays.load(path, stored_arrays.abstract(params), again)
