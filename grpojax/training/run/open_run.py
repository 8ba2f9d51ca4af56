"""Opening of a run directory, by one process or by several.

Errors are found before anything is written, and are said by all processes: the
first of them looks into the directory and writes there, each
looks at what it reads itself.
"""

import contextlib
import importlib.metadata as metadata
import pathlib
import time
import zlib
from collections.abc import Callable, Sequence

import jax

from grpojax.data.examples import SPLITS
from grpojax.models import huggingface as hf
from grpojax.models.huggingface.file_checksums import fingerprint
from grpojax.runtime import checkpoint
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.files import bucket, disk, hub, run_lock
from grpojax.runtime.processes import distributed
from grpojax.runtime.terminal.screen import Screen
from grpojax.runtime.text import tokenizer
from grpojax.training import policy as policy_lib
from grpojax.training.config import from_config, to_config
from grpojax.training.data import splits as splits_lib
from grpojax.training.report import tracking
from grpojax.training.run import (
  hub_pins,
  resume,
  run_config,
  run_directory,
  run_storage,
  start,
)
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import rewards


def _say_changed(settings: TrainSettings, changed: Sequence[str]) -> None:
  """Prints the other settings that a run goes on with."""
  for line in changed:
    print(f"changed: {line}")
  schedule = settings.optim.schedule
  if schedule != "constant" and any(x.startswith("steps:") for x in changed):
    print(
      f"optim.schedule = {schedule!r} is of the whole run: from here on the "
      f"learning rate is that of a run of {settings.steps} steps"
    )


def _go_on(directory: pathlib.Path, settings: TrainSettings) -> None:
  """Prints and records the other settings that a run goes on with."""
  changed, _ = run_config.changed(directory, settings)
  _say_changed(settings, changed)
  run_directory.record_changes(directory, settings)


SEEN_WITHIN = 60
"""Seconds: a network's file system may remember for a while that there was no
such file."""


def _check_shared(directory: pathlib.Path) -> None:
  """Checks that this process sees and may write what the first one wrote.

  It writes its part of the checkpoints.
  """
  end = time.monotonic() + SEEN_WITHIN
  config = bucket.origin(directory) / run_config.CONFIG
  while not config.is_file():
    if time.monotonic() > end:
      raise ValueError(
        f"{directory} is not the directory that process 0 writes to: with "
        "several processes, --run_dir must be on storage that all of them share"
      )
    time.sleep(0.5)
  disk.check_writable(directory, "--run_dir")


def _model_files(path: str) -> str:
  if hub.parse(path) and not hf.exists(path):
    return "from the Hub"  # whose commits are the same for all
  return fingerprint(policy_lib.find_model(path))


def _files(settings: TrainSettings) -> dict[str, str]:
  """Files that each process reads from a disk that may be its own."""
  files = {
    f"the model in {path}": _model_files(path)
    for path in (settings.model.path, settings.reward.model)
    if path
  }
  for function in settings.reward.functions:
    file = pathlib.Path(function.rpartition(":")[0])
    if file.suffix == ".py":
      files[str(file)] = file.read_text()
  return files


def _check_data(checked: start.Checked) -> None:
  """Checks that all processes have read the same examples."""
  splits = zip(SPLITS, (checked.train, checked.held_out), strict=True)
  distributed.check_same(
    **{
      f"the {name} split": f"{len(split.examples)} examples that fit\n"
      f"fingerprint {split.fingerprint}"
      for name, split in splits
    }
  )


def _version(package: str) -> str:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return "from source"


def _code(root: pathlib.Path = pathlib.Path(__file__).parents[2]) -> str:
  """This package's own files: a checkout may have been edited on one host."""
  return "\n".join(
    f"{path.relative_to(root)}: crc32 {zlib.crc32(path.read_bytes()):08x}"
    for path in sorted(root.rglob("*.py"))
  )


def settle(
  settings: TrainSettings, directory: pathlib.Path
) -> TrainSettings | None:
  """Returns the settings that the run goes on with; None for a finished one.

  Raises:
    ValueError: It cannot be run, there, or by all processes alike.
  """
  if distributed.several():
    distributed.check_same(
      configuration=config_lib.to_json(to_config(settings)),
      packages=f"grpojax {_version('grpojax')}\njax {jax.__version__}",
      code=_code(),
    )
    with distributed.agreed():
      files = _files(settings)
    distributed.check_same(**files)

  def settle():
    settled = run_config.with_pins(directory, settings)
    run_directory.check(directory, settled)
    if run_directory.is_finished(directory, settled):
      return None
    disk.check_writable(directory, "--run_dir")
    pinned = hub_pins.pin(settled)
    return config_lib.to_json(to_config(pinned))

  text = distributed.on_main(settle)
  return text and from_config(config_lib.from_json(text))


def open_all(
  settings: TrainSettings,
  directory: pathlib.Path,
  stack: contextlib.ExitStack,
  check_signals: Callable[..., None],
  sync: Callable[..., None],
  screen: Screen,
):
  """Finds all errors of a run, and opens all that it holds.

  Args:
    settings: Settings, from `settle`.
    directory: Directory of the run.
    stack: Context that closes what is opened.
    check_signals: Function that is called in between; may raise.
    sync: Function that copies the directory, of `run_storage.opened`.
    screen: Screen that shows the progress.

  Returns:
    The run, the state to go on from, the optimizer, the progress, and the
    checkpointer.

  Raises:
    SystemExit: With a message, where the run cannot be started.
  """

  def begun() -> bool:
    return (directory / run_config.CONFIG).is_file()

  def hold() -> None:
    stack.enter_context(run_lock.hold(directory))

  def open_directory() -> bool:
    try:
      resumed = run_directory.open_run(directory, checked.settings)
      if resumed:
        run_config.say_added(directory)
        run_directory.say_restart(directory)
      splits = {"train": checked.train, "test": checked.held_out}
      splits_lib.save_lengths(directory / run_directory.LENGTHS, splits)
      sync()
    except (OSError, disk.WriteFailed) as error:
      reason = getattr(error, "strerror", None) or error
      raise ValueError(f"{directory} cannot be written: {reason}") from error
    return resumed

  with command_line.usage_errors():
    first = not distributed.on_main(begun)
    if not first:
      distributed.on_main(hold)
    today = distributed.on_main(tokenizer.today)
    with distributed.agreed():
      checked = start.check(settings, directory, check_signals, today)
    _check_data(checked)
    if first:  # what cannot run leaves no directory
      distributed.on_main(hold)
    resumed = distributed.on_main(open_directory)
    with distributed.agreed():
      _check_shared(directory)
  checkpointer = stack.enter_context(
    checkpoint.open_checkpointer(
      run_storage.checkpoints(directory), checked.settings.checkpoint.keep
    )
  )
  with command_line.usage_errors():
    reward_pool = stack.enter_context(
      rewards.open_reward_pool(checked.settings, checked.reward_model)
    )
    stack.enter_context(jax.set_mesh(checked.mesh))
    run, state, tx = start.start(directory, checked, checkpointer, reward_pool)
    run = run._replace(screen=screen)
  with command_line.usage_errors():
    step = checkpoint.latest_step(checkpointer)
    run = tracking.tracked(run, -1 if step is None else step, stack)
    state, progress = resume.resume(run, state, checkpointer, check_signals)
    if resumed:
      distributed.on_main(lambda: _go_on(directory, checked.settings))
  return run, state, tx, progress, checkpointer
