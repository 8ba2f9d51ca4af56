"""A training run: its steps, evaluations and checkpoints, to the end.

SIGTERM is answered where `poll` is called: between the parts of a step, while
the device samples or diagnoses, between batches of an evaluation, at least once
a second while rewards are computed, and for each prompt that is read before the
start. What runs on in between is one compilation, the update of a step or (with
reward.on_device) the step, the reading of the weights, and with reward.workers
= 0 the reward of one completion.
"""

import contextlib
import functools
import importlib.metadata as metadata
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import TrainState
from grpojax.runtime import (
  checkpoint,
  command_line,
  disk,
  distributed,
  preemption,
  records,
  run_lock,
)
from grpojax.runtime import config as config_lib
from grpojax.training import (
  device_step,
  from_config,
  host_step,
  reporting,
  resume,
  run_directory,
  scoring,
  start,
)
from grpojax.training import progress as progress_lib
from grpojax.training import prompts as prompts_lib
from grpojax.training.config import validate
from grpojax.training.progress import Progress
from grpojax.training.start import Run

Poll = Callable[..., None]


class Preempted(Exception):
  """SIGTERM arrived; the message says what was saved."""


class Stopped(Exception):
  """The run cannot or should not go on; the message says why."""


def _make_step(run: Run, tx, poll: Poll, group_size: int):
  args = (run.config, run.policy, group_size, tx, run.ref_params, run.places)
  if run.config.reward.on_device:
    return device_step.make_device_step(*args)
  return host_step.make_host_step(*args, run.scorer, poll)


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


def remaining_steps(
  run: Run, state: TrainState, tx, progress: Progress, poll: Poll
) -> Iterator[tuple[TrainState, Progress]]:
  """The remaining steps; what is after each of them, recorded and printed."""
  config, seconds = run.config, []
  make_step = functools.cache(functools.partial(_make_step, run, tx, poll))
  places = run.places.group_size
  observe = jax.jit(from_config.observe(config), out_shardings=places)
  size, batches = None, iter(())
  first, every = int(state.step) + 1, config.diagnostics.every
  if first <= config.steps:
    print("the first step compiles, which takes a while", flush=True)
  began = time.perf_counter() - progress.train_seconds
  for step in range(first, config.steps + 1):
    poll(together=True)
    clock = time.perf_counter()
    if size != _group_size(config, state):
      size = _group_size(config, state)
      consumed = int(state.prompts_consumed)
      batches = prompts_lib.training_batches(
        config, run.policy, run.train.examples, size, consumed
      )
    try:
      prompts, examples = next(batches)
    except ValueError as error:  # an endless data set's, or data that changed
      raise Stopped(str(error)) from error
    prompts = mesh_lib.place(prompts_lib.trim(prompts), run.mesh, "batch")
    diagnosed = every > 0 and (step - 1) % every == 0
    step_ = make_step(size)
    state, row, shown, failures = step_(state, prompts, examples, diagnosed)
    if diagnosed:
      state = _adapt(state, row, observe)
    now = time.perf_counter()
    seconds.append(now - clock)
    row = {"step": step, "group_size": size, **row}
    row["train_seconds"] = now - began
    row |= reporting.speed(config, row, seconds[-1])
    progress = progress_lib.after(progress, row)
    # The first step compiles; the pace is that of the others.
    others = seconds[1:]
    pace = sum(others) / len(others) if others else None
    reporting.log(run, row, shown, pace)
    reporting.log_failures(run, step, failures)
    yield state, progress


def fit(
  run: Run, state: TrainState, tx, progress: Progress, checkpointer, poll: Poll
) -> tuple[TrainState, Progress]:
  """Runs the remaining steps, evaluating and saving on the way.

  Raises:
    Preempted: SIGTERM arrived.
    Stopped: the run goes nowhere, or its data do.
      The state of the last whole step is saved in both cases.
    disk.WriteFailed, OSError: a checkpoint or a record could not be written.
  """
  config = run.config

  def ask(together=False):
    checkpoint.check(checkpointer)  # a save may have failed
    poll(together)

  def save():
    notes = progress_lib.to_notes(progress)
    checkpoint.save(checkpointer, int(state.step), state, notes)

  def evaluate():
    step = int(state.step)
    due = step > 0 and (step % config.eval.every == 0 or step == config.steps)
    done = functools.partial(reporting.evaluations, run, step)
    if due and not distributed.on_main(done):
      reporting.evaluate_held_out(run, state.params, step, ask)

  try:
    evaluate()  # where the run was ended in the middle of it
    for done in remaining_steps(run, state, tx, progress, ask):
      state, progress = done
      evaluate()
      step = int(state.step)
      if step % config.checkpoint.every == 0 or step == config.steps:
        save()
      limits = {name: config.stop[name] for name in progress_lib.TROUBLES}
      why = progress_lib.hopeless(progress, limits)
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
  return state, progress


def _say_changed(config: ConfigDict, changed: Sequence[str]) -> None:
  """Says with which other settings a run goes on."""
  for line in changed:
    print(f"changed: {line}")
  schedule = config.optim.schedule
  if schedule != "constant" and any(x.startswith("steps:") for x in changed):
    print(
      f"optim.schedule = {schedule!r} is of the whole run: from here on the "
      f"learning rate is that of a run of {config.steps} steps"
    )


def _go_on(directory: pathlib.Path, config: ConfigDict) -> None:
  """Says and records with which other settings a run goes on."""
  changed, _ = run_directory.changed(directory, config)
  _say_changed(config, changed)
  run_directory.record_changes(directory, config)


def _check_shared(directory: pathlib.Path) -> None:
  """Whether this process sees what the first one has written."""
  if not (directory / run_directory.CONFIG).is_file():
    raise ValueError(
      f"{directory} is not the directory that process 0 writes to: with "
      "several processes, --run_dir must be on storage that all of them share"
    )


def _version(package: str) -> str:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return "from source"


def _settle(config: ConfigDict, directory: pathlib.Path) -> ConfigDict | None:
  """The config that the run goes on with; None where it is finished.

  Raises:
    ValueError: it cannot be run, there, or by all processes alike.
  """
  validate(config)
  distributed.check_same(
    configuration=config_lib.to_json(config),
    packages=f"grpojax {_version('grpojax')}\njax {jax.__version__}",
  )

  def settle():
    settled = run_directory.with_date(directory, config)
    run_directory.check(directory, settled)
    if run_directory.is_finished(directory, settled):
      return None
    disk.check_writable(directory, "--run_dir")
    return config_lib.to_json(settled)

  text = distributed.on_main(settle)
  return text and config_lib.from_json(text)


def _open(config: ConfigDict, directory: pathlib.Path, stack, poll: Poll):
  """All that can be wrong is found, and all that a run holds is opened."""

  def begun() -> bool:
    return (directory / run_directory.CONFIG).is_file()

  def hold() -> None:
    stack.enter_context(run_lock.hold(directory))

  def open_directory() -> bool:
    resumed = run_directory.open_run(directory, checked.config)
    if resumed:
      run_directory.say_added(directory)
    splits = {"train": checked.train, "test": checked.held_out}
    prompts_lib.save_lengths(directory / run_directory.LENGTHS, splits)
    return resumed

  with command_line.usage_errors():
    first = not distributed.on_main(begun)
    if not first:
      distributed.on_main(hold)
    with distributed.agreed():
      checked = start.check(config, directory, poll)
    if first:  # what cannot run leaves no directory
      distributed.on_main(hold)
    resumed = distributed.on_main(open_directory)
    with distributed.agreed():
      _check_shared(directory)
  checkpointer = stack.enter_context(
    checkpoint.open_checkpointer(
      directory / run_directory.CHECKPOINTS, checked.config.checkpoint.keep
    )
  )
  with command_line.usage_errors():
    scorer = stack.enter_context(
      scoring.open_scorer(checked.config, checked.reward_model)
    )
    stack.enter_context(jax.set_mesh(checked.mesh))
    run, state, tx = start.start(directory, checked, checkpointer, scorer)
  if run.writer is not None:
    stack.callback(records.close_writer, run.writer)
  with command_line.usage_errors():
    state, progress = resume.resume(run, state, checkpointer, poll)
    if resumed:
      distributed.on_main(lambda: _go_on(directory, checked.config))
  return run, state, tx, progress, checkpointer


def run(config: ConfigDict, directory: pathlib.Path) -> dict[str, Any] | None:
  """A whole training run, from where it stands to its end.

  Args:
    config: the resolved config.
    directory: the run's; resumed where it holds a part of the same run.

  Returns:
    The summary, None where the run had been finished before.

  Raises:
    SystemExit: with a message, where the run cannot be started or should not go
      on; with code 75 after SIGTERM, 130 after an interrupt from the keyboard.
  """
  with command_line.usage_errors():
    config = _settle(config, directory)
    if config is None:
      return None
  with contextlib.ExitStack() as stack:
    stack.enter_context(disk.errors())
    requested = stack.enter_context(preemption.install())

    def poll(together=False):
      if requested(together):
        raise Preempted

    try:
      run, *state, checkpointer = _open(config, directory, stack, poll)
      state, progress = fit(run, *state, checkpointer, poll)
      return reporting.finish(run, state.params, progress, poll)
    except Preempted as done:
      done = str(done) or "no step since the start: nothing to save"
      print(f"{done}; the same command resumes", flush=True)
      sys.exit(preemption.EXIT_PREEMPTED)
    except Stopped as reason:
      sys.exit(f"stopped: {reason}")
    except KeyboardInterrupt:
      print("interrupted; the same command resumes from the last checkpoint")
      sys.exit(130)
    except OSError as error:
      if not disk.refuses(error):
        raise
      last = checkpoint.last_good(directory / run_directory.CHECKPOINTS)
      raise disk.WriteFailed(f"{error}; {last}") from error
