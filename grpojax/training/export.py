"""A run's model, or its adapters, as a directory that other programs read."""

import os
import pathlib

import jax
from ml_collections import ConfigDict

from grpojax.models import hf, lora
from grpojax.runtime import disk, hub
from grpojax.training import policy as policy_lib
from grpojax.training import (
  run_config,
  run_directory,
  run_storage,
  sources,
  trained,
)


def host_device() -> jax.Device:
  """The host: a model that was trained on many devices may not fit on one."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out
    return jax.local_devices()[0]


def _plain_model(where: pathlib.Path) -> pathlib.Path | None:
  """The model directory that is meant, None where it is not one, or a run."""
  a_run = run_directory.model_directory(where) != pathlib.Path(where)
  if a_run or run_directory.is_run(where):
    return None
  try:
    return hf.resolve(where)
  except ValueError:
    return None


def _base(config: ConfigDict) -> tuple[str, str | None]:
  """What adapters call their base model, and its commit on the Hub."""
  name = None if hf.exists(config.model.path) else hub.parse(config.model.path)
  if name is None:
    there = run_storage.local(config.model.path)
    return str(run_directory.model_directory(there)), None
  return name.id, hub.parse(sources.model(config)).revision


def export(
  run: str | pathlib.Path,
  out: pathlib.Path,
  step: int | None = None,
  dtype: str | None = None,
  adapter: bool = False,
  best: bool = False,
) -> str:
  """Writes a run's model, or with `adapter` its adapters, into a new directory.

  Args:
    run: the run directory, or its URL in a bucket; or a model directory, or
      the name of an embedded model, which is copied.
    out: the directory to make; nothing stands there until all is written.
    step: of the checkpoint; None is the newest, or a finished run's model/
      where there are no checkpoints.
    dtype: of the stored weights; None is as they were trained.
    adapter: write LoRA's adapters in PEFT's format instead of the model.
    best: write the state of the highest held-out accuracy.

  Returns:
    What was written, in words.

  Raises:
    ValueError: no run, no such checkpoint, `out` exists or cannot be made, or
      `adapter` of a run without LoRA.
  """
  where = run_storage.local(run)
  model = _plain_model(where)
  if os.path.lexists(out):
    raise ValueError(f"--out={out} exists already; choose another directory")
  if model:
    disk.check_writable(out, "--out")
    if adapter or step is not None:
      raise ValueError(f"--adapter and --step are of a run, and {run} is none")
    hf.save(out, hf.load_params(model), model, dtype=dtype)
    return f"the model {run}"
  config = run_config.read_config(where)
  run_config.say_added(where)
  rank = config.lora.rank
  disk.check_writable(out, "--out")
  if adapter and not rank:
    raise ValueError(f"--adapter: {run} was not trained with LoRA (lora.rank)")
  if best and step is not None:
    raise ValueError("give --best or --step, not both")
  if best:
    step = trained.best_step(where)
  finished = run_directory.model_directory(where)
  if step is None and not run_directory.is_run(where) and finished != where:
    if adapter:
      raise ValueError(f"--adapter: {run} has no checkpoints, only its model")
    hf.save(out, hf.load_params(finished), finished, dtype=dtype)
    return f"the finished model of {run}"
  step, params = trained.load_params(where, config, step, host_device())
  what = f"step {step} of {run}"
  needed = hub.WHOLE if rank and not adapter else hub.TEXTS
  source = policy_lib.find_model(sources.model(config), needed)
  if adapter:
    base = _base(config)
    lora.save_peft(out, params, source, config.lora.alpha, dtype, *base)
    return f"the adapters of {what}"
  if rank:
    base = hf.load_params(source)
    params = lora.merge_lazily(base, params, config.lora.alpha / rank)
  hf.save(out, params, source, dtype=dtype)
  return what
