"""Opens a new or resumed run, in one process or several.

`settle` returns the facts recorded in its directory; `open_all` checks
everything before it writes, opens the directory, and loads the newest
checkpoint. Process 0 checks and writes the directory; every process checks the
files it reads.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from grpojax.core.types import TrainState
from grpojax.data.examples import SPLITS
from grpojax.models import huggingface as hf
from grpojax.runtime import checkpoint
from grpojax.runtime.checkpoint import stored_arrays
from grpojax.runtime.cli import command_line, configs
from grpojax.runtime.files import disk, run_lock, run_storage, user_code
from grpojax.runtime.processes import distributed, user_calls
from grpojax.runtime.text.chat_template import DATE, today
from grpojax.training.config import to_config
from grpojax.training.data import splits
from grpojax.training.files import run_directory, sources
from grpojax.training.files.sources import find_model, fingerprint, hub_name
from grpojax.training.report import reporting
from grpojax.training.report.progress import Progress, from_notes
from grpojax.training.run import memory, setup, start
from grpojax.training.settings.run import Facts, TrainSettings, completed
from grpojax.training.step import pending, reference
from grpojax.training.step.extensions import difficulty, moving_reference
from grpojax.training.step.run import Run

_ON_HUB = "from the Hub"  # the commit is the same in all processes

# Facts of the start.


def recorded_facts(settings: TrainSettings, directory: pathlib.Path) -> Facts:
  """Returns the facts in a run's config that hold for these settings."""
  saved = run_directory.saved(directory)
  if not saved:
    return Facts()
  values = configs.flatten(saved.config)
  length = values.get("data.max_prompt_length")
  if not isinstance(length, int) or not run_directory.has_begun(directory):
    length = 0
  return Facts(
    sources.commits_in_use(settings, saved.config.get("commits")),
    values.get(f"data.template_options.{DATE}"),
    length,
  )


def settle(settings: TrainSettings, directory: pathlib.Path) -> Facts | None:
  """Returns a run's recorded facts, with commits of all models and data.

  Returns None for a finished run. ValueError for an unusable directory, or if
  processes differ.
  """
  if distributed.several():
    distributed.check_same(
      configuration=configs.to_json(to_config(settings)),
      packages=f"jax {jax.__version__}",
      code=_code(),
    )
    with distributed.agreed():
      files = _files(settings)
    distributed.check_same(**files)

  def known() -> dict[str, Any] | None:
    facts = recorded_facts(settings, directory)
    resumed = completed(settings, facts)
    run_directory.check(directory, resumed)
    if run_directory.is_finished(directory, resumed):
      return None
    disk.check_keeps_runs(directory, "--run_dir")
    return facts._replace(commits=sources.all_commits(resumed))._asdict()

  facts = distributed.on_main(known)
  return None if facts is None else Facts(**facts)


def _code(root: pathlib.Path = pathlib.Path(__file__).parents[2]) -> str:
  """Returns checksums of grpojax's files, to compare them between hosts."""
  return "\n".join(
    f"{path.relative_to(root)}: crc32 {zlib.crc32(path.read_bytes()):08x}"
    for path in sorted(root.rglob("*.py"))
  )


def _files(settings: TrainSettings) -> dict[str, str]:
  """Maps files that may differ between hosts to their texts or hashes."""
  model = settings.model
  files = _user_files(settings)
  for path in filter(None, (model.path, model.teacher, settings.reward.model)):
    text = _ON_HUB if hub_name(path) else fingerprint(find_model(path))
    files[f"the model in {path}"] = text
  return files


def _user_files(settings: TrainSettings) -> dict[str, str]:
  """Maps files of the user's functions and their imports to their texts."""
  texts = {}
  environment = settings.environment
  names = *settings.reward.functions, *environment.tools, environment.path
  for name in names:
    if file := user_calls.split(name)[0]:
      texts |= user_code.sources(file)
  return texts


# Opening.


def open_all(
  settings: TrainSettings,
  facts: Facts,
  directory: pathlib.Path,
  stack: contextlib.ExitStack,
  check_signals: Callable[..., None],
  sync: Callable[..., None],
):
  """Checks a run and opens its resources, which the stack will close.

  Returns the run, its newest state, the progress and the checkpointer;
  SystemExit with a message if the run cannot start.
  `check_signals` is called repeatedly and may raise; see `run_storage.opened`
  for `sync`.
  """
  check_directory = lambda: None  # until `hold` sets it

  def hold() -> None:
    nonlocal check_directory
    check_directory = stack.enter_context(run_lock.hold(directory))

  def open_directory() -> bool:
    try:
      resumed = run_directory.open_run(directory, run.settings)
      run_directory.remove_torn(directory)
      if resumed:
        run_directory.say_added(directory)
        run_directory.say_restart(directory)
      by_name = {"train": run.train, "test": run.held_out}
      splits.save_lengths(directory / run_directory.LENGTHS, by_name)
      sync()
    except (OSError, disk.WriteFailed) as error:
      reason = getattr(error, "strerror", None) or error
      raise ValueError(f"{directory} cannot be written: {reason}") from error
    return resumed

  def record_changes() -> None:
    changed = run_directory.record_changes(directory, run.settings)
    _say_changed(run.settings, changed, 0 if step is None else step)

  with command_line.usage_errors():
    config = directory / run_directory.CONFIG
    first = not distributed.on_main(config.is_file)
    if not first:
      distributed.on_main(hold)
    date = distributed.on_main(today)
    # All processes take the first one's limit, to compile the same program.
    limit = distributed.on_main(memory.accelerator_bytes)
    with distributed.agreed():
      # Check everything, and that all processes read the same examples.
      run = start.check(
        settings, facts, directory, stack, check_signals, date, limit
      )
    examples = {
      f"the {name} split": f"{count} examples\nfingerprint {checksum}"
      for name, (count, checksum) in _fingerprints(run).items()
    }
    distributed.check_same(**examples)
    if first:  # only after all checks, since the lock creates the directory
      distributed.on_main(hold)
    resumed = distributed.on_main(open_directory)
    with distributed.agreed():
      _check_shared(directory)
    # Load the model and the newest state.
    keep = run.settings.checkpoint.keep
    checkpointer = stack.enter_context(
      checkpoint.open_checkpointer(run_storage.checkpoints(directory), keep)
    )
    run = run._replace(check_directory=check_directory)
    run, state = start.start(run, checkpointer)
    step = checkpoint.latest_step(checkpointer)
    run = reporting.tracked(run, -1 if step is None else step, stack)
    state, progress = resume(run, state, checkpointer, check_signals)
    if resumed:
      distributed.on_main(record_changes)
  return run, state, progress, checkpointer


def _say_changed(settings: TrainSettings, lines: list[str], done: int) -> None:
  """Prints the changed settings of a run that resumes after `done` steps."""
  for line in lines:
    print(f"changed: {line}")
    steps = re.fullmatch(r"steps: (\d+) -> \d+", line)
    if not steps or settings.optim.schedule == "constant":
      continue
    before = dataclasses.replace(settings, steps=int(steps[1]))
    update = done * settings.optim.update.epochs
    update *= settings.optim.update.minibatches
    old, new = (
      float(setup.learning_rate(s)(update)) for s in (before, settings)
    )
    print(
      f"warning: optim.schedule = {settings.optim.schedule!r} now ends after "
      f"{settings.steps} steps instead of {before.steps}: after step {done} "
      f"the learning rate is {new:.3g}, not {old:.3g}. To train on at a low "
      f"rate start a new run from {run_directory.MODEL}/ with optim.schedule = "
      "'constant'"
    )


SEEN_WITHIN = 60  # seconds in which a network file system must show a new file


def _check_shared(directory: pathlib.Path) -> None:
  """Checks that this process can read and write the directory of process 0."""
  end = time.monotonic() + SEEN_WITHIN
  config = run_storage.origin(directory) / run_directory.CONFIG
  while not config.is_file():
    if time.monotonic() > end:
      raise ValueError(
        f"process 0 writes to another {directory}: with several processes "
        "--run_dir must be on shared storage"
      )
    time.sleep(0.5)
  disk.check_writable(directory, "--run_dir")


# Resume.


def resume(
  run: Run,
  state: TrainState,
  checkpointer: checkpoint.Checkpointer,
  check_signals: Callable[[], None],
) -> tuple[TrainState, Progress]:
  """Loads the newest state and its progress.

  Evaluates the starting weights (in `state`), unless they were evaluated before
  on the same number of prompts. ValueError if data, files or frozen weights
  changed, or if the checkpoint is damaged or belongs to another model.
  """
  step = checkpoint.latest_step(checkpointer)
  notes = {} if step is None else checkpoint.read_notes(checkpointer, step)
  progress = from_notes(notes)
  # Compare the data, files and frozen weights with those of the last start.
  data, frozen, files = _fingerprints(run), _frozen(run), _file_hashes(run)
  changed = _changed_data(progress.data, data)
  changed += _changed_files(progress.files, files)
  if changed and not run.settings.allow_changed_inputs:
    raise ValueError("\n".join(changed))
  same_prompts = progress.data.get("train", data["train"]) == data["train"]
  if difficulty.NAME in state.extras and not same_prompts:
    raise ValueError(
      "the training prompts changed, so this run's success rates "
      "(difficulty.priority) no longer fit: restore the data, or export "
      "this run's model (python -m grpojax.export) and start a new run from it"
    )
  for line in changed:
    print(f"changed: {line.partition('. ')[0]}", flush=True)
  jax_facts = _jax_facts(progress.jax)
  if progress.frozen not in ("", frozen):
    raise ValueError(
      f"the weights in {run.settings.model.path} changed since this run's "
      "adapters were trained: restore the old weights to resume, or to export "
      "this run's model (python -m grpojax.export) and start a new run from it"
    )
  # The starting weights are evaluated once, on the same number of prompts.
  baseline = progress.baseline
  if baseline is None or baseline["prompts"] != len(run.held_out.examples):
    evaluated = distributed.on_main(lambda: reporting.evaluations(run, 0))
    baseline = next(iter(evaluated), None)
  if baseline is None:
    baseline = reporting.evaluate_held_out(run, state.params, 0, check_signals)
  baseline = {k: v for k, v in baseline.items() if k != "step"}
  progress = dataclasses.replace(
    progress,
    baseline=baseline,
    data=data,
    files=files,
    jax=jax_facts,
    frozen=frozen,
  )
  if step is not None:
    # Checkpoints are saved and restored with the reference in device memory.
    state = moving_reference.moved(state, reference.to_device)
    state = checkpoint.restore(checkpointer, state, step)
    memory = run.settings.model.reference
    to_memory = functools.partial(reference.to_memory, memory=memory)
    state = moving_reference.moved(state, to_memory)
    state = pending.from_stored(state, run.mesh)
    print(f"resuming after step {step}", flush=True)
    if changed and state.pending is not None:
      text = "discarding the pending rollout: it was sampled with old inputs"
      print(text, flush=True)
      state = state.replace(pending=None)
  return state, progress


def _fingerprints(run: Run) -> dict[str, Any]:
  return {
    name: [len(split.examples) + split.dropped, split.fingerprint]
    for name, split in zip(SPLITS, (run.train, run.held_out), strict=True)
  }


def _frozen(run: Run) -> str:
  """Returns a hash of the frozen weights; "" without adapters."""
  if run.policy.frozen is None:
    return ""
  sums = json.dumps(stored_arrays.checksums(run.policy.frozen), sort_keys=True)
  return f"{zlib.crc32(sums.encode()):08x}"


def _jax_facts(before: dict[str, str]) -> dict[str, str]:
  """Returns JAX's version and numerical settings; prints their changes."""
  names = ("jax_enable_x64", "jax_default_matmul_precision")
  now = {name.upper(): str(getattr(jax.config, name)) for name in names}
  now["JAX's version"] = jax.__version__
  for name, value in now.items():
    if (old := before.get(name, value)) != value:
      print(f"{name} was {old} and is {value}: numbers differ from here on")
  return now


def _file_hashes(run: Run) -> dict[str, str]:
  """Maps the files behind prompts, rewards and teacher to their hashes."""
  settings = run.settings
  policy = run.policy
  files = {x: y.encode() for x, y in _user_files(settings).items()}
  for name in hf.COMPANIONS:
    file = policy.files.directory / name
    if file.is_file():
      files[f"{settings.model.path}/{name}"] = file.read_bytes()
  teacher = policy.teacher and policy.teacher.files
  models = {settings.model.teacher: teacher}
  models[settings.reward.model] = run.reward_model
  for path, model in models.items():
    if model:
      text = _ON_HUB if model.name else fingerprint(model.directory)
      files[path] = text.encode()
  return {x: hashlib.sha256(y).hexdigest() for x, y in files.items()}


_ALTERNATIVES = (
  "accept the change (--config.allow_changed_inputs=True), or export this "
  "run's model (python -m grpojax.export) and start a new run from it"
)


def _changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
  """Returns a line if files changed, unless `before` is {}, as in old runs."""
  names = sorted({*before, *now} if before else ())
  changed = [name for name in names if before.get(name) != now.get(name)]
  return changed and [
    f"{', '.join(changed)}: changed since this run started, which affects its "
    f"prompts, rewards or teacher. Restore the old files, {_ALTERNATIVES}"
  ]


def _changed_data(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
  """Returns a line for each split whose examples changed."""
  lines = []
  for split, (count, checksum) in now.items():
    old, old_checksum = before.get(split, (count, checksum))
    # With a new eval.num_prompts the held-out hashes cannot be compared.
    if checksum == old_checksum or (split == "test" and old != count):
      continue
    differ = ", of which some differ" if old == count else ""
    lines.append(
      f"the {split} split changed since this run started: {old} examples then, "
      f"{count} now{differ}. Restore the data (data.path, data.options), "
      f"{_ALTERNATIVES}"
    )
  return lines
