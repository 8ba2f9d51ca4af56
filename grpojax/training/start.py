"""How a training run starts: what is checked, and the state it goes on from."""

import itertools
import pathlib
from typing import Any, NamedTuple

import jax
import optax
from ml_collections import ConfigDict

from grpojax.core.types import Params, TrainState
from grpojax.data.examples import SPLITS
from grpojax.models.transformer import last_layers
from grpojax.rewards import functions
from grpojax.runtime import checkpoint, records, sharding
from grpojax.runtime import config as config_lib
from grpojax.training import (
  from_config,
  group_sizes,
  prompts,
  run_directory,
  scoring,
)
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy

CHECKED_PROMPTS = 4096  # training prompts read before a run starts


class Checked(NamedTuple):
  """What a config names, loaded and found to be in order."""

  policy: Policy
  mesh: jax.sharding.Mesh
  train: prompts.Split
  held_out: prompts.Split
  reward_model: scoring.Model | None


class Run(NamedTuple):
  """What stays the same all through a run."""

  config: ConfigDict
  directory: pathlib.Path
  policy: Policy
  mesh: jax.sharding.Mesh
  places: TrainState  # shardings
  ref_params: Params | None
  writer: Any
  scorer: scoring.Scorer
  train: prompts.Split
  held_out: prompts.Split

  def file(self, name: str) -> pathlib.Path:
    """A path inside the run directory."""
    return self.directory / name


def check(config: ConfigDict) -> Checked:
  """Loads what the config names and reads the first prompts of both splits.

  Raises:
    ValueError: what would otherwise be found out after the run has started.
  """
  functions.resolve_all(
    config.reward.functions, config.reward.options.to_dict()
  )
  policy = from_config.open_policy(config)
  mesh = sharding.make_mesh(**config.mesh)
  parts = config.optim.minibatches * config.optim.micro_batches
  leaves = config_lib.flatten(config)
  sizes = group_sizes.group_sizes(leaves)
  for size in sizes:
    rows = group_sizes.samples_per_step(leaves) // size
    sharding.check_rows(
      mesh, micro_batch=rows // parts, eval_batch=config.eval.batch_size
    )
  train, held_out = (
    prompts.load_split(config, policy, split) for split in SPLITS
  )
  if train.dropped or held_out.dropped:
    print(
      f"dropped {train.dropped} training and {held_out.dropped} held-out "
      f"prompts of more than {config.data.max_prompt_length} tokens"
    )
  batches = prompts.training_batches(config, policy, train.examples, sizes[0])
  ahead = min(config.steps, CHECKED_PROMPTS // config.batch_size + 1)
  for _ in itertools.islice(batches, ahead):
    pass
  for _ in prompts.held_out(config, policy, held_out.examples):
    pass
  policy = from_config.with_weights(config, policy, mesh)
  if config.diagnostics.every and config.diagnostics.last_layers:
    last_layers(policy.params, config.diagnostics.last_layers)
  reward_model = scoring.open_model(config, mesh)
  return Checked(policy, mesh, train, held_out, reward_model)


def start(
  config: ConfigDict,
  directory: pathlib.Path,
  checked: Checked,
  checkpointer: checkpoint.Checkpointer,
  scorer: scoring.Scorer,
) -> tuple[Run, TrainState, optax.GradientTransformation]:
  """The first or the newest state; cleans up after a run that was cut short.

  Args:
    config: the run's.
    directory: the run's.
    checked: from `check`; its parameters become the state's.
    checkpointer: of the run's checkpoints.
    scorer: of the rewards.

  Returns:
    The run, the state to go on from, and the optimizer.

  Raises:
    ValueError: a checkpoint that is damaged or of another model.
  """
  tx = optimizer(config)

  def fresh(params):
    return from_config.first_state(config, tx, params)

  policy, mesh, train, held_out, _ = checked
  places = sharding.shardings(jax.eval_shape(fresh, policy.params), mesh)
  params = jax.device_put(policy.params, places.params)
  count = sum(x.size for x in jax.tree.leaves((params, policy.frozen)))
  ref_params = None
  if from_config.needs_reference(config) and policy.frozen is not None:
    ref_params = {}  # the base model, without adapters
  elif from_config.needs_reference(config):
    reference = directory / run_directory.REFERENCE
    checkpoint.save_params(reference, params)
    ref_params = checkpoint.restore_params(reference, params)
  state = jax.jit(fresh, out_shardings=places, donate_argnums=0)(params)
  step = checkpoint.latest_step(checkpointer)
  if step is not None:
    state = checkpoint.restore(checkpointer, state, step)
    print(f"resuming after step {step}")
  for name in run_directory.RECORDS:
    records.truncate_jsonl(directory / name, -1 if step is None else step)
  print(
    f"{config.model.path}: {count / 1e6:.3g} million parameters on "
    f"{mesh.size} {mesh.devices.flat[0].platform} device(s)",
    flush=True,
  )
  writer = None
  if config.log.tensorboard:
    writer = records.tensorboard_writer(
      directory / run_directory.TENSORBOARD, -1 if step is None else step
    )
  policy = policy._replace(params=None)
  run = Run(
    config=config,
    directory=directory,
    policy=policy,
    mesh=mesh,
    places=places,
    ref_params=ref_params,
    writer=writer,
    scorer=scorer,
    train=train,
    held_out=held_out,
  )
  return run, state, tx
