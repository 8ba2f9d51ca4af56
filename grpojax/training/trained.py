"""What other programs read of training runs: their models."""

import pathlib

import jax
from ml_collections import ConfigDict

from grpojax.core.types import Params
from grpojax.models import hf, lora
from grpojax.runtime import checkpoint, hub
from grpojax.training import best as best_lib
from grpojax.training import policy as policy_lib
from grpojax.training import (
  progress,
  run_config,
  run_directory,
  run_storage,
  setup,
  sources,
)
from grpojax.training.config import from_config
from grpojax.training.policy import Policy


def is_run(model: str) -> bool:
  """Whether it has a config of its own, be its checkpoints gone or not."""
  where = run_storage.local(model)
  finished = run_directory.is_finished(where) and (
    run_directory.model_directory(where) != where
  )
  return finished or run_directory.is_run(where)


def read_config(model: str) -> ConfigDict:
  """The config of a run; ValueError where it has none."""
  return run_config.read_config(run_storage.local(model))


def load(
  model: str, dtype: str = "float32", best: bool = False
) -> tuple[Policy, Params]:
  """A policy and its parameters.

  Args:
    model: as `policy.find_model` takes it, or a run with checkpoints, of which
      the newest is read.
    dtype: of computation; a run has its own.
    best: read the run's state of the highest held-out accuracy.

  Raises:
    ValueError: there is no such model, or it is damaged.
  """
  where = run_storage.local(model)
  if not run_directory.is_run(where):
    if best:
      raise ValueError(f"--best: {model} is no run with checkpoints")
    policy = policy_lib.load_policy(model, dtype)
    return policy, policy.params
  saved = from_config(run_config.read_config(where))
  policy = setup.open_policy(saved)
  if saved.lora.rank:  # adapters need their base
    policy = setup.with_weights(saved, policy)
  step = best_step(where) if best else None
  step, params = load_params(where, saved, step)
  run_config.say_added(where)
  print(f"{model}: checkpoint of step {step}")
  return policy, params


def best_step(run: str | pathlib.Path) -> int:
  """The step of a run's state of the highest held-out accuracy.

  Raises:
    ValueError: it was not kept, or there is none yet.
  """
  with checkpoint.open_checkpointer(
    run_storage.checkpoints(run), readonly=True
  ) as checkpointer:
    there = checkpoint.steps(checkpointer)
    notes = checkpoint.read_notes(checkpointer, there[-1]) if there else {}
  step = best_lib.step(progress.from_notes(notes).evaluations)
  if step not in there:
    raise ValueError(
      f"--best: {run} has kept no best state (checkpoint.best), only those of "
      f"steps {there}"
    )
  return step


def load_params(
  run: str | pathlib.Path,
  config: ConfigDict,
  step: int | None = None,
  device: jax.Device | None = None,
) -> tuple[int, Params]:
  """What a run has trained, from a checkpoint.

  Args:
    run: the run directory.
    config: its config.
    step: None is the newest.
    device: where to load it; None is the first.

  Returns:
    The checkpoint's step, and what was trained: the model, or LoRA's adapters.

  Raises:
    ValueError: there is no such checkpoint, or it is damaged.
  """
  params = hf.abstract_params(
    hf.read_config(policy_lib.find_model(sources.model(config), hub.CONFIG))
  )

  if config.lora.rank:
    key, targets = jax.random.key(0), config.lora.targets
    params = jax.eval_shape(
      lambda params: lora.init(params, key, config.lora.rank, targets), params
    )
  place = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params
  )
  if not run_directory.is_run(run):
    raise ValueError(f"{run} has no checkpoints")
  saved = run_storage.checkpoints(run)
  with checkpoint.open_checkpointer(saved, readonly=True) as checkpointer:
    if step is None:
      step = checkpoint.latest_step(checkpointer)
    if step is None:
      raise ValueError(f"{run} has no complete checkpoint yet")
    return step, checkpoint.restore_policy(checkpointer, like, step)
