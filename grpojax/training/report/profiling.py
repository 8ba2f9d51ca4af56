"""Trace of some steps of a run, and of the devices' memory after them.

A trace that cannot be written is said and left out: no run ends for it, nor for
the room that half of it takes on a full disk.
"""

import contextlib
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator

import jax

from grpojax.runtime.processes import distributed

PROFILE = "profile"  # in the run directory
_TRACES = "plugins/profile/*"  # in it; each has the time of its beginning
MEMORY = "memory.prof"  # in that one; for pprof

Around = Callable[[int], contextlib.AbstractContextManager[None]]


def parse(text: str) -> range:
  """Parses profile.steps: "10:12" is the steps 10, 11 and 12, "" is none.

  Raises:
    ValueError: it is something else.
  """
  if not text:
    return range(0)
  parts = re.fullmatch(r"(\d+):(\d+)", text)
  first, last = map(int, parts.groups()) if parts else (0, 0)
  if not 1 <= first <= last:
    raise ValueError("give FIRST:LAST, as 10:12 for steps 10, 11 and 12")
  return range(first, last + 1)


@contextlib.contextmanager
def opened(
  text: str, directory: pathlib.Path, done: int = 0
) -> Iterator[Around]:
  """Traces some steps with `jax.profiler`, for xprof and TensorBoard.

  Whatever fails, and writing what is large, comes after the step itself: close
  this when the state is saved.

  Args:
    text: the setting profile.steps.
    directory: directory of the run; each process writes its own files there.
    done: number of steps that the run has done before.

  Yields:
    `(step) -> context manager`, to put around each step: the trace begins with
    the first of them and ends after the last, or where the context ends.
  """
  steps, folder, running = parse(text), directory / PROFILE, []
  before = [*folder.glob(_TRACES)]
  if steps and steps[-1] <= done:
    print(f"profile.steps = {text!r}: {done} steps are done, nothing is traced")

  @contextlib.contextmanager
  def errors_end_the_trace():
    nonlocal steps
    try:
      yield
    except Exception as error:  # whatever it is, the run is worth more
      steps = range(0)
      for half in {*folder.glob(_TRACES)} - {*before}:
        shutil.rmtree(half, ignore_errors=True)
      reason = f"{type(error).__name__}: {error}"
      print(f"profile: not written ({reason}); the run goes on", flush=True)

  def start(step):
    folder.mkdir(exist_ok=True)
    jax.profiler.start_trace(folder)
    running.append(step)

  def stop():
    running.clear()
    jax.profiler.stop_trace()
    name = MEMORY
    if distributed.several():
      name = f"{jax.process_index()}.{name}"
    jax.profiler.save_device_memory_profile(folder / name)
    print(f"profile: xprof {folder}; memory: pprof {folder / name}", flush=True)

  @contextlib.contextmanager
  def around(step):
    if step in steps and not running:
      with errors_end_the_trace():
        start(step)
    if not running:
      yield
      return
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield
    if step == steps[-1]:
      with errors_end_the_trace():
        stop()

  try:
    yield around
  finally:
    if running:
      with errors_end_the_trace():
        stop()
