"""A training run: its steps, evaluations and checkpoints, to the end.

SIGTERM is answered where `check_signals` is called: between the parts of a
step, while the device samples or diagnoses, between batches of an evaluation,
at least once a second while rewards are computed, and for each prompt that is
read before the start. What runs on in between is one compilation, the update of
a step or (with reward.on_device) the step, the reading of the weights, and with
reward.workers = 0 the reward of one completion; on s3:// also the copying of a
checkpoint.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from grpojax.core.types import TrainState
from grpojax.runtime import (
  checkpoint,
  checkpoint_files,
  command_line,
  disk,
  distributed,
  interrupts,
  screen,
)
from grpojax.training import (
  adapting,
  best,
  device_step,
  filter_groups,
  host_step,
  opening,
  profiling,
  prompt_choice,
  reference,
  report,
  reporting,
  reward_inputs,
  run_storage,
)
from grpojax.training import eta as eta_lib
from grpojax.training import progress as progress_lib
from grpojax.training import prompts as prompts_lib
from grpojax.training.progress import Progress
from grpojax.training.start import Run

Poll = Callable[..., None]


class Preempted(Exception):
  """SIGTERM arrived; the message says what was saved."""


class Stopped(Exception):
  """The run cannot or should not go on; the message says why."""


def _make_step(run: Run, tx, check_signals: Poll, group_size: int):
  args = (run.config, run.policy, group_size, tx, run.ref_params, run.shardings)
  if run.config.reward.on_device:
    return device_step.make_device_step(*args)
  return host_step.make_host_step(*args, run.reward_pool, check_signals)


def _group_size(config: ConfigDict, state: TrainState) -> int:
  """Of the next step."""
  chosen = state.group_size
  return config.group_size if chosen is None else int(chosen.group_size)


def remaining_steps(
  run: Run,
  state: TrainState,
  tx,
  progress: Progress,
  check_signals: Poll,
  around: profiling.Around = lambda step: contextlib.nullcontext(),
) -> Iterator[tuple[TrainState, Progress]]:
  """The remaining steps; what is after each of them, recorded and printed.

  `around(step)` is a context for each.
  """
  config, eta = run.config, eta_lib.Eta()
  make_step = functools.cache(
    functools.partial(_make_step, run, tx, check_signals)
  )
  adapt = adapting.make_update_group_size(run)
  follow = reference.make_update_reference(config, run.shardings)
  size, batches, choose = None, iter(()), None
  parts = filter_groups.draw_parts(config)

  def take(count=1):
    try:
      prompts, examples = prompts_lib.take(batches, count, run.mesh)
    # An endless data set's; and of files that changed, or are gone.
    except (ValueError, OSError) as error:
      raise Stopped(str(error)) from error
    so_far = step - 1, config.steps
    return prompts, reward_inputs.with_step(
      run.reward_pool.pool, examples, *so_far
    )

  first, every = int(state.step) + 1, config.diagnostics.every
  if first <= config.steps:
    run.screen.busy("the first step compiles, which takes a while")
  began = time.perf_counter() - progress.train_seconds
  for step in range(first, config.steps + 1):
    check_signals(together=True)
    clock = time.perf_counter()
    if size != _group_size(config, state):
      size = _group_size(config, state)
      consumed = int(state.prompts_consumed)
      args = config, run.policy, run.train.examples, size
      if state.difficulty is None:
        batches = prompts_lib.training_batches(*args, consumed, parts)
      else:
        choose = prompt_choice.make_draw(*args)
    if choose is not None:
      batches = map(choose, [state])  # in `take`, which says what is wrong
    given = take(parts)
    diagnosed = every > 0 and (step - 1) % every == 0
    step_ = make_step(size)
    with around(step):
      state, row, shown, failures = step_(state, *given, diagnosed, take)
    state = follow(state)
    if diagnosed:
      state = adapt(state, row)
    now = time.perf_counter()
    eta = eta_lib.after_step(eta, now - clock)
    row = {"step": step, "group_size": size, **row}
    row["train_seconds"] = now - began
    row |= reporting.speed(config, row, now - clock)
    progress = progress_lib.after(progress, row)
    reporting.log(run, row, shown, eta)
    reporting.log_failures(run, step, failures)
    yield state, progress
    eta = eta_lib.after_pause(eta, time.perf_counter() - now)


def fit(
  run: Run,
  state: TrainState,
  tx,
  progress: Progress,
  checkpointer,
  check_signals: Poll,
  sync: Poll,
  around: profiling.Around,
) -> tuple[TrainState, Progress]:
  """Runs the remaining steps, evaluating and saving on the way.

  `around(step)` is a context for each.

  Raises:
    Preempted: SIGTERM arrived.
    Stopped: the run goes nowhere, or its data do.
      The state of the last whole step is saved in both cases.
    disk.WriteFailed, OSError: a checkpoint or a record could not be written.
  """
  config, record = run.config, progress.evaluations
  if config.checkpoint.best:
    record = best.kept(record, checkpoint.steps(checkpointer))

  def ask(together=False):
    saved = checkpoint.check(checkpointer)  # it may have failed
    sync(lazily=not saved)
    check_signals(together)

  def save():
    notes = progress_lib.to_notes(with_record())
    sync()  # the rows of a step come before its checkpoint
    kept = reference.on_devices(state)
    always = best.step(record) if config.checkpoint.best else None
    checkpoint.save(checkpointer, int(state.step), kept, notes, always)

  def with_record():
    return dataclasses.replace(progress, evaluations=record)

  def evaluate():
    """Whether the run goes on."""
    nonlocal record
    step = int(state.step)
    if step > 0 and (step % config.eval.every == 0 or step == config.steps):
      rows = distributed.on_main(lambda: reporting.evaluations(run, step))
      if not rows:
        try:
          rows = [reporting.evaluate_held_out(run, state.params, step, ask)]
        except FileNotFoundError as error:  # of the held-out problems
          raise Stopped(str(error)) from error
      record = best.after(record, progress.baseline, rows[-1])
    why = best.stopping(record, config.stop.no_improvement)
    if why and step < config.steps:
      print(why, flush=True)
      return False
    return True

  def steps():
    if evaluate():  # where the run was ended in the middle of it
      yield from remaining_steps(run, state, tx, progress, ask, around)

  try:
    for done in steps():
      state, progress = done
      goes_on = evaluate()
      step = int(state.step)
      is_best = config.checkpoint.best and best.step(record) == step
      reporting.report_when_due(run, step)
      due = step % config.checkpoint.every == 0 or step == config.steps
      if due or is_best or not goes_on:
        save()
      if not goes_on:
        break
      limits = {
        name: config.stop[name] for name in progress_lib.STOP_CONDITIONS
      }
      why = progress_lib.stop_reason(progress, limits)
      if why and step < config.steps:
        raise Stopped(why)
    if config.steps == 0:  # a baseline: evaluated, saved, not trained
      save()
  except (Preempted, Stopped) as reason:
    if int(state.step):  # before the first step there is nothing to keep
      save()
      done = f"saved step {int(state.step)}"
      raise type(reason)("; ".join(filter(None, [str(reason), done]))) from None
    raise
  finally:
    checkpoint.wait(checkpointer)
  return state, with_record()


def run(
  config: ConfigDict,
  directory: pathlib.Path,
  sync: Callable[..., None] = lambda lazily=False: None,
) -> dict[str, Any] | None:
  """A whole training run, from where it stands to its end.

  Args:
    config: the resolved config.
    directory: the run's; resumed where it holds a part of the same run.
    sync: see `run_storage.opened`.

  Returns:
    The summary, None where the run had been finished before.

  Raises:
    SystemExit: with a message, where the run cannot be started or should not go
      on; with code 75 after SIGTERM, 130 after an interrupt from the keyboard.
  """
  with command_line.usage_errors():
    config = opening.settle(config, directory)
    if config is None:
      return None
  with contextlib.ExitStack() as stack:
    stack.enter_context(disk.errors())
    requested = stack.enter_context(
      interrupts.sigterm_requests(distributed.several())
    )
    interrupted = stack.enter_context(interrupts.raising_ctrl_c())
    told = screen.opened(config.steps, config.log.every)
    told = stack.enter_context(told)

    def check_signals(together=False):
      if interrupted:  # and went unnoticed
        raise KeyboardInterrupt
      if requested(together):
        raise Preempted

    try:
      run, state, *rest = opening.open_all(
        config, directory, stack, check_signals, sync, told
      )
      traced = config.profile.steps, directory, int(state.step)
      with profiling.opened(*traced) as around:  # ends when all is saved
        state, progress = fit(run, state, *rest, check_signals, sync, around)
      checkpointer = rest[-1]
      return reporting.finish(run, state, progress, checkpointer, check_signals)
    except (Preempted, interrupts.Left) as done:
      sync()  # before it says so
      done = str(done) or "no step since the start: nothing to save"
      print(f"{done}; the same command resumes", flush=True)
      sys.exit(interrupts.EXIT_PREEMPTED)
    except Stopped as reason:  # there is something to look into
      if distributed.is_main():
        report.write(directory)
      sys.exit(f"stopped: {reason}")
    except KeyboardInterrupt:
      last = checkpoint_files.last_good(run_storage.checkpoints(directory))
      print(f"interrupted; {last}; the same command resumes")
      interrupts.exit_program()
    except OSError as error:
      if not directory.is_dir():
        said = f"{directory} is gone: it was removed or renamed meanwhile"
        raise disk.WriteFailed(said) from error
      if not disk.refuses(error):
        raise
      last = checkpoint_files.last_good(run_storage.checkpoints(directory))
      raise disk.WriteFailed(f"{error}; {last}") from error
