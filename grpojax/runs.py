"""Run directories of training, read by the other programs."""

import pathlib

import jax
from ml_collections import ConfigDict

from grpojax import experiment
from grpojax.core.types import Params
from grpojax.models import hf, lora
from grpojax.runtime import checkpoint
from grpojax.runtime import config as config_lib


def is_run(path: str | pathlib.Path) -> bool:
  """Whether a directory is that of a run with checkpoints."""
  return (pathlib.Path(path) / "checkpoints").is_dir()


def read_config(run: str | pathlib.Path) -> ConfigDict:
  """The config of a run directory.

  Raises:
    ValueError: it has none.
  """
  run = pathlib.Path(run)
  try:
    config = config_lib.from_json((run / checkpoint.CONFIG).read_text())
    if "model.path" in config_lib.flatten(config):
      return config
  except (OSError, TypeError, ValueError):
    pass
  raise ValueError(
    f"no run at {run}: give the run directory of a training run, the one with "
    f"its {checkpoint.CONFIG} and checkpoints/"
  )


def trained(
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
  params = hf.abstract_params(hf.read_config(config.model.path))

  def fresh(params):
    if config.lora.rank:
      key, targets = jax.random.key(0), config.lora.targets
      params = lora.init(params, key, config.lora.rank, targets)
    tx = experiment.optimizer(config)
    return experiment.first_state(config, tx, params)

  place = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    jax.eval_shape(fresh, params),
  )
  with checkpoint.open_checkpointer(run, readonly=True) as checkpointer:
    if step is None:
      step = checkpoint.latest_step(checkpointer)
    if step is None:
      raise ValueError(f"{run} has no complete checkpoint yet")
    return step, checkpoint.restore(checkpointer, like, step).params
