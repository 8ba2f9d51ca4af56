"""Profiler trace of some steps, with a profile of device memory after them.

If writing fails, the error is printed, the trace is removed (the disk may be
full), and the run goes on.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator

import jax

from grpojax.runtime.processes import distributed
from grpojax.training.settings.run import profiled_steps

PROFILE = "profile"  # in the run directory
_TRACES = "plugins/profile/*"  # in PROFILE; named by start time
MEMORY = "memory.prof"  # in PROFILE; pprof reads it

Around = Callable[[int], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def opened(text: str, run: pathlib.Path, done: int = 0) -> Iterator[Around]:
  """Yields `(step) -> context manager`, which traces a step of profile.steps.

  `text` is profile.steps; `done` is the number of completed steps.
  Tracing ends after the last step to trace, or with the context. Writing
  a large trace may fail, so close the context after the state is saved.
  """
  steps = profiled_steps(text)
  folder = run / PROFILE
  running = False
  before = {*folder.glob(_TRACES)}
  if steps and steps[-1] <= done:
    print(f"profile.steps = {text!r}: not traced, since these steps are done")

  def attempt(function):
    """Calls `function`; an error ends the trace but not the run."""
    nonlocal steps
    try:
      function()
    except Exception as error:
      steps = range(0)
      for partial in {*folder.glob(_TRACES)} - before:
        shutil.rmtree(partial, ignore_errors=True)
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
    prefix = f"{jax.process_index()}." if distributed.several() else ""
    memory = folder / f"{prefix}{MEMORY}"
    jax.profiler.save_device_memory_profile(memory)
    print(f"profile: run xprof {folder}; memory: pprof {memory}", flush=True)

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
