"""A training run: its steps, evaluations and checkpoints, to the end."""

import contextlib
import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from grpojax.core.sampling import Sampling
from grpojax.core.types import TrainState
from grpojax.runtime import (
  checkpoint,
  command_line,
  disk,
  preemption,
  records,
  run_lock,
  sharding,
)
from grpojax.training import (
  from_config,
  reporting,
  run_directory,
  scoring,
  start,
  steps,
)
from grpojax.training import prompts as prompts_lib
from grpojax.training.config import validate
from grpojax.training.start import Run


class Preempted(Exception):
  """SIGTERM arrived; the state is that of the last finished step."""


def _make_step(run: Run, tx, poll: Callable[[], None], group_size: int):
  args = (run.config, run.policy, group_size, tx, run.ref_params, run.places)
  if run.config.reward.on_device:
    return steps.make_device_step(*args)
  return steps.make_host_step(*args, run.scorer, poll)


def _group_size(config: ConfigDict, state: TrainState) -> int:
  """Of the next step."""
  chosen = state.group_size
  return config.group_size if chosen is None else int(chosen.group_size)


def _adapt(state: TrainState, row, observe) -> TrainState:
  """Where the group size is chosen while training, learns from a diagnosis."""
  old = state.group_size
  if old is None:
    return state
  new = observe(old, row["c1"], row["c1_se"], row["c3"], row["c3_se"])
  sizes = int(old.group_size), int(new.group_size)
  if sizes[0] != sizes[1]:
    print("group size {} -> {}".format(*sizes), flush=True)
  return state.replace(group_size=new)


def _report(run: Run, row, clock: list[float], shown, failures) -> None:
  """Records and prints the step that has just ended, at the clock's end."""
  row |= reporting.speed(run.config, row, clock)
  # The first step compiles; the pace is that of the others.
  others = len(clock) - 2
  pace = (clock[-1] - clock[1]) / others if others else None
  reporting.log(run, row, shown, pace)
  reporting.log_failures(run, row["step"], failures)


def fit(run: Run, state: TrainState, tx, checkpointer, requested) -> TrainState:
  """Runs the remaining steps, evaluating and saving on the way.

  Raises:
    Preempted: SIGTERM arrived; the state of the last whole step is saved.
    disk.WriteFailed, OSError: a checkpoint or a record could not be written.
  """
  config = run.config

  def poll():
    checkpoint.check(checkpointer)
    if requested():
      raise Preempted

  make_step = functools.cache(functools.partial(_make_step, run, tx, poll))
  places = run.places.group_size
  observe = jax.jit(from_config.observe(config), out_shardings=places)
  size, batches = None, iter(())
  greedy = from_config.make_sampler(config, run.policy, 1, Sampling(0.0))
  place = sharding.batch_sharding(run.mesh)
  rows = records.read_jsonl(run.file(run_directory.METRICS))
  if not any("accuracy" in row for row in rows):
    reporting.evaluate_held_out(run, state.params, greedy, 0)
  if int(state.step) < config.steps:
    print("the first step compiles, which takes a while", flush=True)
  began = time.perf_counter() - reporting.train_seconds(run)
  clock = [time.perf_counter()]
  try:
    for step in range(int(state.step) + 1, config.steps + 1):
      poll()
      if size != _group_size(config, state):
        size = _group_size(config, state)
        consumed = int(state.prompts_consumed)
        batches = prompts_lib.training_batches(
          config, run.policy, run.train.examples, size, consumed
        )
      with command_line.usage_errors():  # a prompt that is too long, say
        prompts, examples = next(batches)
      prompts = jax.device_put(prompts, place)
      every = config.diagnostics.every
      diagnosed = every > 0 and (step - 1) % every == 0
      step_ = make_step(size)
      state, row, shown, failures = step_(state, prompts, examples, diagnosed)
      if diagnosed:
        state = _adapt(state, row, observe)
      clock.append(time.perf_counter())
      row = {"step": step, "group_size": size, **row}
      row["train_seconds"] = clock[-1] - began
      _report(run, row, clock, shown, failures)
      if step % config.eval.every == 0 or step == config.steps:
        reporting.evaluate_held_out(run, state.params, greedy, step)
        clock[1:] = [time.perf_counter()]
      if step % config.checkpoint.every == 0 or step == config.steps:
        checkpoint.save(checkpointer, step, state)
    if config.steps == 0:  # a baseline: evaluated, saved, not trained
      checkpoint.save(checkpointer, 0, state)
  except Preempted:
    if int(state.step):  # before the first step there is nothing to keep
      checkpoint.save(checkpointer, int(state.step), state)
    print(f"saved step {int(state.step)}; the same command resumes", flush=True)
    raise
  finally:
    checkpoint.wait(checkpointer)
  return state


def run(config: ConfigDict, directory: pathlib.Path) -> dict[str, Any] | None:
  """A whole training run, from where it stands to its end.

  Args:
    config: the resolved config.
    directory: the run's; resumed where it holds a part of the same run.

  Returns:
    The summary, None where the run had been finished before.

  Raises:
    SystemExit: with a message, where the run cannot be started; with code 75
      after SIGTERM, 130 after an interrupt from the keyboard.
  """
  with command_line.usage_errors():
    validate(config)
    run_directory.check(directory, config)
    if run_directory.is_finished(directory):
      return None
    checked = start.check(config)
  with contextlib.ExitStack() as stack:
    stack.enter_context(disk.errors())
    with command_line.usage_errors():
      stack.enter_context(run_lock.hold(directory))
      if run_directory.open_run(directory, config):
        run_directory.say_added(directory)
    requested = stack.enter_context(preemption.install())
    checkpointer = stack.enter_context(
      checkpoint.open_checkpointer(
        directory / run_directory.CHECKPOINTS, config.checkpoint.keep
      )
    )
    with command_line.usage_errors():
      scorer = stack.enter_context(
        scoring.open_scorer(config, checked.reward_model)
      )
      run, state, tx = start.start(
        config, directory, checked, checkpointer, scorer
      )
    if run.writer is not None:
      stack.callback(run.writer.close)
    try:
      state = fit(run, state, tx, checkpointer, requested)
    except Preempted:
      sys.exit(preemption.EXIT_PREEMPTED)
    except KeyboardInterrupt:
      print("interrupted; the same command resumes from the last checkpoint")
      sys.exit(130)
    except OSError as error:
      if not disk.refuses(error):
        raise
      raise disk.WriteFailed(
        f"{error}; {checkpoint.last_good(checkpointer)}"
      ) from error
    return reporting.finish(run, state.params)
