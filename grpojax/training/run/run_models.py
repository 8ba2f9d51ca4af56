"""Loads and exports the models of training runs."""

import itertools
import os
import pathlib
import time
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from grpojax.core.types import Params
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.runtime import checkpoint
from grpojax.runtime.files import disk, gguf_directory, run_storage
from grpojax.training import policies
from grpojax.training.config import from_config
from grpojax.training.evaluation import best as best_lib
from grpojax.training.files import run_directory
from grpojax.training.files.sources import ModelFiles, files_of, find_files
from grpojax.training.report import progress
from grpojax.training.run import setup
from grpojax.training.settings.inputs import ModelSettings
from grpojax.training.settings.run import TrainSettings

_DEFAULTS = ModelSettings()
_TRIES = 20  # attempts to read checkpoints that a live run may delete


def is_run(model: str) -> bool:
  """Returns True for a run with checkpoints or a finished model."""
  path = run_storage.local(model)
  finished = run_directory.is_finished(path)
  has_model = finished and run_directory.model_directory(path) != path
  return has_model or run_directory.is_run(path)


def read_config(model: str) -> ConfigDict:
  """Reads the config of a run; ValueError if it has none."""
  return run_directory.read_config(run_storage.local(model))


def load(
  name: str, model: ModelSettings = _DEFAULTS, best: bool = False
) -> tuple[policies.Policy, Params]:
  """Loads a policy and its parameters from a model or a run.

  `name` is a model for `find_model`, or a run with checkpoints. Of a
  run, the newest checkpoint is loaded (with `best` the most accurate), with its
  settings instead of `model`. ValueError for missing or damaged files.
  """
  path = run_storage.local(name)
  if not run_directory.is_run(path):
    if best:
      raise ValueError(f"--best needs a run with checkpoints, not {name}")
    files = find_files(name, model.ignore_keys)
    policy = policies.with_weights(policies.open_policy(files, model.dtype))
    return policy, policy.params
  settings = from_config(run_directory.read_config(path))
  policy = setup.open_policy(settings)
  if settings.lora.rank:  # adapters need their base
    policy = setup.with_weights(settings, policy)
  step, params = load_params(path, settings, policy.files, best=best)
  run_directory.say_added(path)
  print(f"{name}: checkpoint of step {step}")
  return policy, params


def best_step(run: str | pathlib.Path) -> int:
  """Returns the step of the best checkpoint; ValueError if it is not saved."""
  saved = run_storage.checkpoints(run)
  with checkpoint.open_checkpointer(saved, readonly=True) as checkpointer:
    steps = checkpoint.steps(checkpointer)
    notes = checkpoint.read_notes(checkpointer, steps[-1]) if steps else {}
  step = best_lib.step(progress.from_notes(notes).evaluations)
  if step not in steps:
    raise ValueError(
      f"--best: {run} has no best checkpoint (checkpoint.best saves one), only "
      f"steps {steps}: remove --best"
    )
  return step


def load_params(
  run: str | pathlib.Path,
  settings: TrainSettings,
  files: ModelFiles,
  step: int | None = None,
  device: jax.Device | None = None,
  best: bool = False,
) -> tuple[int, Params]:
  """Returns step and trained parameters (or adapters) of a checkpoint.

  Loads the checkpoint of `step`, the `best_step` (if `best`) or the newest one,
  to the first device by default. If a live run deletes it meanwhile, the
  choice is repeated. ValueError for a missing or damaged checkpoint.
  """
  saved = run_storage.checkpoints(run)
  for attempt in itertools.count(1):
    before = checkpoint.complete(saved)
    try:
      step = best_step(run) if best else step
      return _read_params(run, settings, files.config, step, device)
    except (FileNotFoundError, ValueError) as error:
      unchanged = checkpoint.complete(saved) == before
      damaged = isinstance(error, ValueError) and unchanged
      if damaged or attempt == _TRIES:  # else a live run deleted it
        raise
      time.sleep(0.1)


def _read_params(run, settings: TrainSettings, hf_config, step, device):
  params = hf.abstract_params(hf_config)
  if settings.lora.rank:
    params = lora.abstract(params, settings.lora.rank, settings.lora.targets)
  sharding = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params
  )
  if not run_directory.is_run(run):
    raise ValueError(f"{run} has no checkpoints: name another run")
  saved = run_storage.checkpoints(run)
  with checkpoint.open_checkpointer(saved, readonly=True) as checkpointer:
    if step is None:
      step = checkpoint.latest_step(checkpointer)
    if step is None:
      raise ValueError(f"{run} has no complete checkpoint yet: wait for one")
    return step, checkpoint.restore_policy(checkpointer, like, step)


def host_device() -> jax.Device:
  """Returns the CPU device, since large models may not fit on accelerators."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # excluded by JAX_PLATFORMS
    return jax.local_devices()[0]


def _plain_model(path: pathlib.Path) -> pathlib.Path | None:
  """Returns a model's directory; None for a run, or if there is no model."""
  finished = run_directory.model_directory(path) != path
  if finished or run_directory.is_run(path):
    return None
  try:
    return hf.resolve(path)
  except ValueError:
    return None


def _base(settings: TrainSettings, files: ModelFiles) -> tuple[str, str | None]:
  """Returns the base model's path or name, and its Hub commit, for PEFT."""
  path = settings.model.path
  if gguf_directory.is_named(path):
    return path, None  # its path in the cache differs between machines
  if files.name is None:
    return str(files.directory.absolute()), None
  return files.name.id, files.name.revision


def export(
  run: str | pathlib.Path,
  out: pathlib.Path,
  step: int | None = None,
  dtype: str | None = None,
  adapter: bool = False,
  best: bool = False,
  ignore_keys: Sequence[str] = (),
) -> str:
  """Exports a model to a new directory and returns a description of it.

  `run` is a run directory, its gs:// URL, or a model to copy. The source is the
  checkpoint of `step`, the `best` or the newest one, or the model/ of a
  finished run without checkpoints. `adapter` exports LoRA adapters in PEFT's
  format. `dtype` None keeps the data type. `ignore_keys` are for models,
  since a run has its own. `out` appears when it is complete.
  """
  path = run_storage.local(run)
  model = _plain_model(path)
  if os.path.lexists(out):
    raise ValueError(f"--out={out} exists already; choose another directory")
  if model:
    disk.check_writable(out, "--out")
    if adapter or best or step is not None:
      flags = "--adapter, --best and --step"
      raise ValueError(f"{flags} need a run, and {run} is a model")
    params = hf.load_params(model, ignore_keys=ignore_keys)
    hf.save(out, params, model, dtype=dtype, ignore_keys=ignore_keys)
    return f"the model {run}"
  settings = from_config(run_directory.read_config(path))
  rank = settings.lora.rank
  keys = settings.model.ignore_keys
  run_directory.say_added(path)
  disk.check_writable(out, "--out")
  if adapter and not rank:
    raise ValueError(f"--adapter needs a run with LoRA (lora.rank), not {run}")
  if best and step is not None:
    raise ValueError("give --best or --step, not both")
  finished = run_directory.model_directory(path)
  newest = step is None and not best
  if newest and not run_directory.is_run(path) and finished != path:
    if adapter:
      raise ValueError(f"--adapter needs checkpoints: {run} has only a model")
    hf.save(out, hf.load_params(finished), finished, dtype=dtype)
    return f"the finished model of {run}"
  files = files_of(settings)
  step, params = load_params(path, settings, files, step, host_device(), best)
  alpha = settings.lora.alpha
  if adapter:
    base = _base(settings, files)
    lora.save_peft(out, params, files.config, alpha, *base, dtype)
    text = f"the adapters of step {step} of {run}"
    base = settings.model.path
    if gguf_directory.is_named(base):
      text += f" (peft cannot open GGUF files: python -m grpojax.export {base} "
      text += "--out=BASE, and set BASE in adapter_config.json)"
    return text
  if rank:
    whole = hf.load_params(files.with_weights(), ignore_keys=keys)
    params = lora.merge_lazily(whole, params, alpha / rank)
  hf.save(out, params, files.directory, dtype=dtype, ignore_keys=keys)
  return f"step {step} of {run}"
