"""A training run: steps, evaluations and checkpoints.

SIGTERM is handled (`check_signals`) between the parts of a step, while the
device samples or diagnoses, between batches of an evaluation, once a second
while rewards are computed, and after each prompt read before the start. It has
to wait for compilation, loading of weights, and the update (with sampling.ahead
also the next rewards, with reward.on_device the whole step). With
reward.workers = 0 it waits for a completion's reward, at most reward.timeout.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpojax.core.types import TrainState
from grpojax.runtime import checkpoint, compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.files import disk, run_lock, run_storage
from grpojax.runtime.processes import distributed, interrupts
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.evaluation import best
from grpojax.training.files import run_directory
from grpojax.training.report import profiling, reporting, run_report
from grpojax.training.report import progress as progress_lib
from grpojax.training.report.progress import Progress
from grpojax.training.run import open_run
from grpojax.training.run.start import inputs_of
from grpojax.training.settings.batches import draw_parts, samples_per_step
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import (
  device,
  host,
  reference,
  sampling,
  scoring,
)
from grpojax.training.step import pending as pending_lib
from grpojax.training.step.extension import Extension, StepResult
from grpojax.training.step.extensions import (
  group_size,
  moving_reference,
  open_extensions,
)
from grpojax.training.step.run import Run

CheckSignals = Callable[..., None]


class Preempted(Exception):
  """SIGTERM arrived; the message names the saved step."""


class Stopped(Exception):
  """The run cannot or should not go on; the message gives the reason."""


class _PromptStream:
  """Prompts of each step, in the data's order or chosen by an extension."""

  def __init__(self, run: Run, extensions: Mapping[str, Extension]):
    self._run = run
    self._choose = [x.choose for x in extensions.values() if x.choose]
    self._group_size = None
    self._batches = iter(())

  def open(self, state: TrainState, group_size: int) -> None:
    """Opens the stream at the state's position, unless it is already there."""
    settings = self._run.settings
    if self._choose:  # `map` is lazy: `take` raises its errors
      (choose,) = self._choose
      self._batches = map(choose, [state], [group_size])
    elif self._group_size != group_size:
      self._group_size = group_size
      args = settings, self._run.policy, self._run.train.examples, group_size
      start = int(state.prompts_consumed)
      parts = draw_parts(settings)
      self._batches = prompts_lib.training_batches(*args, start, parts)

  def take(self, step: int, count: int = 1):
    """Takes `count` parts; raises Stopped for an invalid prompt."""
    run = self._run
    try:
      prompts, examples = prompts_lib.take(self._batches, count, run.mesh)
    except (ValueError, OSError) as error:
      raise Stopped(str(error)) from error
    pool = run.reward_pool.pool
    steps = run.settings.steps
    return prompts, scoring.with_step(pool, examples, step - 1, steps)


def remaining_steps(
  run: Run,
  state: TrainState,
  progress: Progress,
  check_signals: CheckSignals,
  around: profiling.Around,
) -> Iterator[tuple[TrainState, Progress]]:
  """Runs each remaining step in the context `around(step)`; yields results."""
  settings = run.settings
  inputs = inputs_of(run, check_signals)
  extensions = open_extensions(inputs)

  @functools.cache
  def step_of(group_size: int) -> Callable[..., StepResult]:
    if settings.reward.on_device:
      return device.make_device_step(inputs, extensions, group_size)
    opened = host.open_step(inputs, extensions, group_size)
    return functools.partial(host.take_step, opened)

  stream = _PromptStream(run, extensions)
  eta = reporting.Eta()
  compiled = compilation.seconds()
  began = time.perf_counter() - progress.train_seconds
  upcoming = None
  parts = draw_parts(settings)
  for number in range(int(state.step) + 1, settings.steps + 1):
    check_signals(together=True)
    start = time.perf_counter()
    programs = len(compiled)
    # Take the prompts of this step and, if sampled ahead, of the next one.
    size = group_size.current(settings, state)
    stream.open(state, size)
    prompts, examples = upcoming or stream.take(number, parts)
    ahead = settings.sampling.ahead and number < settings.steps
    upcoming = stream.take(number + 1, parts) if ahead else None
    take = functools.partial(stream.take, number)
    with around(number):
      try:
        result = step_of(size)(state, prompts, examples, take, upcoming)
      except sampling.NoSamples as error:
        raise Stopped(str(error)) from error
    state = result.state
    now = time.perf_counter()
    # Complete the step's row of metrics, and log it.
    row = {"step": number, "group_size": size, **result.metrics}
    row["train_seconds"] = now - began
    row = _with_speed(settings, row, now - start, sum(compiled[programs:], 0.0))
    eta = eta.after_step(row["seconds_step"] - row["seconds_compile"])
    progress = progress_lib.after(progress, row)
    if "c1" in row:  # a diagnosis
      row = progress_lib.with_pooled_group_size(progress, row)
    reporting.log(run, row, result, eta)
    del result  # its batch would take memory in the next step
    yield state, progress
    eta = eta.after_pause(time.perf_counter() - now)


def _with_speed(
  settings: TrainSettings, row: dict[str, Any], seconds: float, compiled: float
) -> dict[str, Any]:
  drawn = samples_per_step(settings) * row.get("gen_batches", 1)
  tokens = drawn * float(row["completion_length_mean"])
  return row | {
    # JAX measures compilation with a clock that may be set back or forward.
    "seconds_compile": min(max(compiled, 0.0), seconds),
    "seconds_step": seconds,
    "tokens_per_second": tokens / seconds,
  }


def fit(
  run: Run,
  state: TrainState,
  progress: Progress,
  checkpointer,
  check_signals: CheckSignals,
  sync: CheckSignals,
  around: profiling.Around,
) -> tuple[TrainState, Progress]:
  """Runs, evaluates and saves the remaining steps.

  Raises:
    Preempted: SIGTERM arrived; the last complete step is saved.
    Stopped: A stop condition holds or a prompt is invalid; the last complete
      step is saved.
    disk.WriteFailed, OSError: A checkpoint or record could not be written.
  """
  settings = run.settings
  record = progress.evaluations
  if settings.checkpoint.best:
    record = best.without_lost(record, checkpoint.steps(checkpointer))

  def check_all(together=False):
    saved = checkpoint.check(checkpointer)  # raises if a save failed
    sync(lazily=not saved)
    check_signals(together)

  def with_record():
    return dataclasses.replace(progress, evaluations=record)

  def save():
    notes = dataclasses.asdict(with_record())
    sync()  # upload the rows of a step before its checkpoint
    run.check_directory()  # Orbax would create a missing directory
    saved = moving_reference.moved(state, reference.to_device)
    saved = pending_lib.to_stored(saved, run.mesh)
    always = best.step(record) if settings.checkpoint.best else None
    checkpoint.save(checkpointer, int(state.step), saved, notes, always)

  def evaluate():
    """Evaluates when due; returns True if the run goes on."""
    nonlocal record
    step = int(state.step)
    if step > 0 and (step % settings.eval.every == 0 or step == settings.steps):
      rows = distributed.on_main(lambda: reporting.evaluations(run, step))
      if not rows:
        held_out = reporting.evaluate_held_out
        rows = [held_out(run, state.params, step, check_all)]
      reporting.warn_of_shortcut(progress.baseline, rows[-1])
      record = best.after(record, progress.baseline, rows[-1])
    why = best.stopping(record, settings.stop.no_improvement)
    if why and step < settings.steps:
      print(why, flush=True)
      return False
    return True

  def steps():
    if evaluate():  # a resumed run may have to end before its next step
      yield from remaining_steps(run, state, progress, check_all, around)

  try:
    for state, progress in steps():
      # Evaluate first: a checkpoint may be kept for its accuracy.
      goes_on = evaluate()
      step = int(state.step)
      is_best = settings.checkpoint.best and best.step(record) == step
      every = settings.log.report_every
      if every and step % every == 0 and distributed.is_main():
        run_report.write(run.directory)
      due = step % settings.checkpoint.every == 0 or step == settings.steps
      if due or is_best or not goes_on:
        save()
      if not goes_on:
        break
      limits = dataclasses.asdict(settings.stop)
      why = progress_lib.stop_reason(progress, limits)
      if why and step < settings.steps:
        raise Stopped(why)
    if settings.steps == 0:  # only the baseline is evaluated
      save()
  except (Preempted, Stopped) as reason:
    if int(state.step):
      save()
      done = _saved(run, int(state.step))
      raise type(reason)("; ".join(filter(None, [str(reason), done]))) from None
    raise
  finally:
    checkpoint.wait(checkpointer)
  return state, with_record()


def _saved(run: Run, step: int) -> str:
  """Returns a line: the saved step and, after the last step, missing files."""
  names = run_directory.MODEL, run_directory.REPORT, run_directory.SUMMARY
  missing = [name for name in names if not run.file(name).exists()]
  text = f"saved step {step}"
  if missing and step == run.settings.steps:
    text += f"; still to be written: {', '.join(missing)}"
  return text


def run(
  settings: TrainSettings,
  directory: pathlib.Path,
  sync: Callable[..., None] = lambda lazily=False: None,
) -> dict[str, Any] | None:
  """Starts or resumes a run; returns its summary, None if already finished.

  `sync` uploads changes of the directory (`run_storage.opened`).

  Raises:
    SystemExit: With a message, if the run cannot start or go on; with code 75
      after SIGTERM, 130 after Ctrl-C.
  """
  with command_line.usage_errors():
    facts = open_run.settle(settings, directory)
    if facts is None:
      return None
  with contextlib.ExitStack() as stack:
    stack.enter_context(disk.errors())
    stack.enter_context(compilation.memory_errors())
    sigterm = interrupts.sigterm_requests(distributed.several())
    requested = stack.enter_context(sigterm)
    interrupted = stack.enter_context(interrupts.raising_ctrl_c())
    announce = functools.partial(print, flush=True)
    stack.enter_context(compilation.announced(announce))

    def check_signals(together=False):
      if interrupted:  # other code caught the exception of Ctrl-C
        raise KeyboardInterrupt
      if requested(together):
        raise Preempted

    try:
      run, state, progress, checkpointer = open_run.open_all(
        settings, facts, directory, stack, check_signals, sync
      )
      with profiling.opened(
        settings.profile.steps, directory, int(state.step)
      ) as around:
        state, progress = fit(
          run, state, progress, checkpointer, check_signals, sync, around
        )
      try:
        return reporting.finish(
          run, state, progress, checkpointer, check_signals
        )
      except Preempted:
        raise Preempted(_saved(run, int(state.step))) from None
    except (Preempted, interrupts.Left) as done:
      sync()
      done = str(done) or "no step since the start: nothing to save"
      print(f"{done}; the same command resumes", flush=True)
      sys.exit(interrupts.EXIT_PREEMPTED)
    except Stopped as reason:
      if distributed.is_main():
        run_report.write(directory)
      sys.exit(f"stopped: {reason}")
    except KeyboardInterrupt:
      last = checkpoint.last_good(run_storage.checkpoints(directory))
      last = last if directory.is_dir() else f"there is no {directory} yet"
      print(f"interrupted; {last}; the same command resumes")
      interrupts.exit_program()
    except OSError as error:
      if not directory.is_dir():
        raise disk.WriteFailed(run_lock.gone(directory)) from error
      if not disk.refuses(error):
        raise
      last = checkpoint.last_good(run_storage.checkpoints(directory))
      raise disk.WriteFailed(f"{error}; {last}") from error
