"""Trace of some steps of a run, and of the devices' memory after them.

A trace that cannot be written is reported and removed, which may free a full
disk; the run goes on.
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
  """Parses profile.steps: "10:12" is the steps 10, 11 and 12, "" is none."""
  if not text:
    return range(0)
  parts = re.fullmatch(r"(\d+):(\d+)", text)
  if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
    raise ValueError("give FIRST:LAST, as 10:12 for steps 10, 11 and 12")
  return range(int(parts[1]), int(parts[2]) + 1)


@contextlib.contextmanager
def opened(text: str, run: pathlib.Path, done: int = 0) -> Iterator[Around]:
  """Traces the steps of profile.steps (`text`), for xprof and TensorBoard.

  Writing a large trace may fail: close this after the state is saved. `done`
  steps were done before the program began. Yields `(step) -> context manager`
  to put around each step; the trace ends after the last, or with the context.
  """
  steps, folder, running = parse(text), run / PROFILE, False
  before = {*folder.glob(_TRACES)}
  if steps and steps[-1] <= done:
    print(f"profile.steps = {text!r}: {done} steps are done, nothing is traced")

  def attempt(function):
    """Calls `function`; any error ends the trace, and not the run."""
    nonlocal steps
    try:
      function()
    except Exception as error:
      steps = range(0)
      for half in {*folder.glob(_TRACES)} - before:
        shutil.rmtree(half, ignore_errors=True)
      reason = f"{type(error).__name__}: {error}"
      print(f"profile: not written ({reason}); the run goes on", flush=True)

  def start():
    nonlocal running
    folder.mkdir(exist_ok=True)
    jax.profiler.start_trace(folder)
    running = True

  def stop():
    nonlocal running
    running = False
    jax.profiler.stop_trace()
    own = f"{jax.process_index()}." if distributed.several() else ""
    memory = folder / f"{own}{MEMORY}"
    jax.profiler.save_device_memory_profile(memory)
    print(f"profile: xprof {folder}; memory: pprof {memory}", flush=True)

  @contextlib.contextmanager
  def around(step):
    if step in steps and not running:
      attempt(start)
    with (
      jax.profiler.StepTraceAnnotation("train", step_num=step)
      if running
      else contextlib.nullcontext()
    ):
      yield
    if running and step == steps[-1]:
      attempt(stop)

  try:
    yield around
  finally:
    if running:
      attempt(stop)
