"""How a training run starts: what is checked, and the state it goes on from."""

import itertools
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from ml_collections import ConfigDict

from grpojax.core.sampling import Sampling
from grpojax.core.types import Params, TrainState
from grpojax.data.examples import SPLITS
from grpojax.models import sharding
from grpojax.models.transformer import last_layers
from grpojax.runtime import (
  bucket,
  checkpoint,
  distributed,
  hub,
  records,
  tokenizer,
  trackers,
)
from grpojax.runtime import config as config_lib
from grpojax.runtime.screen import Screen
from grpojax.training import (
  batch_sizes,
  from_config,
  group_sizes,
  memory,
  prompt_choice,
  prompts,
  reward_inputs,
  run_config,
  run_directory,
  run_storage,
  samplers,
  scoring,
  sources,
  splits,
)
from grpojax.training import reference as reference_lib
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy, find_model


class Checked(NamedTuple):
  """What a config names, loaded and found to be in order.

  Attributes:
    config: with what the start of the run has decided.
    policy: with the weights that the run starts from.
    mesh: of all devices.
    train: examples of the training split.
    held_out: examples of the test split.
    reward_model: or None.
  """

  config: ConfigDict
  policy: Policy
  mesh: jax.sharding.Mesh
  train: splits.Split
  held_out: splits.Split
  reward_model: scoring.Model | None


class Run(NamedTuple):
  """What stays the same all through a run."""

  config: ConfigDict
  directory: pathlib.Path
  policy: Policy
  mesh: jax.sharding.Mesh
  shardings: TrainState  # its shardings
  ref_params: Params | None  # where it is fixed
  reward_pool: scoring.RewardPool
  greedy: Any  # (params, prompts, key) -> Rollout, compiled once
  train: splits.Split
  held_out: splits.Split
  screen: Screen = Screen()
  track: Callable[[int, Any], None] = lambda step, row: None  # see `tracking`

  def file(self, name: str) -> pathlib.Path:
    """A path inside the run directory."""
    return self.directory / name


def check(
  config: ConfigDict,
  directory: pathlib.Path,
  check_signals: Callable[[], None],
  today: str | None = None,
) -> Checked:
  """Loads what the config names and reads all prompts of finite data sets.

  Args:
    config: the run's.
    directory: the run's, which may not exist yet; written to only later.
    check_signals: called while much is read; may raise.
    today: the date, where a chat template asks for it: the same in all
      processes, whose clocks may differ. None is this process's.

  Raises:
    ValueError: what would otherwise be found out after the run has started.
  """
  trackers.check(config.log.trackers)
  rewards = reward_inputs.resolve(config)
  policy = from_config.open_policy(config)
  config = _with_date(config, policy, today)
  mesh = from_config.mesh(config)
  memory.check(config, policy, mesh)
  batch_sizes.check(config, mesh)
  reference_lib.check(config.model.reference, mesh)
  sizes = group_sizes.group_sizes(config_lib.flatten(config))
  cache = directory / run_directory.LENGTHS
  train, held_out = (
    splits.load_split(config, policy, split, cache, check_signals)
    for split in SPLITS
  )
  for split in (train, held_out):
    reward_inputs.check_columns(config, rewards, split)
  if train.dropped or held_out.dropped:
    print(
      f"dropped {train.dropped} training and {held_out.dropped} held-out "
      f"prompts of more than {config.data.max_prompt_length} tokens"
    )
  prompt_choice.init(config, train.examples)  # refuses what is not for it
  if config.reward.on_device:  # what it wants to know of each prompt
    batches = prompts.training_batches(config, policy, train.examples, sizes[0])
    ahead = min(config.steps, splits.MEASURED // config.batch_size + 1)
    for _ in itertools.islice(batches, ahead):
      check_signals()
  policy = from_config.with_weights(config, policy, mesh)
  check_signals()
  if config.diagnostics.every and config.diagnostics.last_layers:
    last_layers(policy.params, config.diagnostics.last_layers)
  reward_model = scoring.open_model(config, mesh)
  return Checked(config, policy, mesh, train, held_out, reward_model)


def _with_date(
  config: ConfigDict, policy: Policy, today: str | None = None
) -> ConfigDict:
  """Pins the date where a chat template asks for today's.

  Prompts would be other ones tomorrow: on resume, and in evaluations.
  """
  if "date_string" in config.data.template_options:
    return config
  tokenizers = [policy.tokenizer]
  if config.reward.model:
    model = find_model(sources.reward_model(config), hub.TEXTS)
    tokenizers.append(tokenizer.load(model))
  if not any(map(tokenizer.asks_for_date, tokenizers)):
    return config
  return run_config.pin_date(config, today or tokenizer.today())


def _say_room(folder: str | os.PathLike, state: TrainState) -> None:
  """Says where a checkpoint may not fit onto a disk; Orbax compresses a bit."""
  if bucket.is_url(folder):
    return
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  free = shutil.disk_usage(folder).free
  if size > free:
    print(
      f"! a checkpoint has {memory.gigabytes(size)}, and {folder} has room for "
      f"{memory.gigabytes(free)}",
      flush=True,
    )


def start(
  directory: pathlib.Path,
  checked: Checked,
  checkpointer: checkpoint.Checkpointer,
  reward_pool: scoring.RewardPool,
) -> tuple[Run, TrainState, optax.GradientTransformation]:
  """The state before the first step; cleans up after a run that was cut short.

  Args:
    directory: the run's.
    checked: from `check`; its parameters become the state's.
    checkpointer: of the run's checkpoints.
    reward_pool: of the rewards.

  Returns:
    The run, the state, and the optimizer.

  Raises:
    ValueError: a reference that is damaged or of another model.
  """
  config, policy, mesh, train, held_out, _ = checked
  tx = optimizer(config)

  def fresh(params):
    state = from_config.first_state(config, tx, params)
    return state.replace(difficulty=prompt_choice.init(config, train.examples))

  shardings = sharding.shardings(jax.eval_shape(fresh, policy.params), mesh)
  params = jax.device_put(policy.params, shardings.params)
  count = sum(x.size for x in jax.tree.leaves((params, policy.frozen)))
  ref_params = following = None
  if reference_lib.follows(config):
    following = reference_lib.first(params, shardings.params)
  elif from_config.needs_reference(config) and policy.frozen is not None:
    ref_params = {}  # the base model, without adapters
  elif from_config.needs_reference(config):
    reference = run_storage.reference(directory)
    checkpoint.save_params(reference, params)
    ref_params = checkpoint.restore_params(reference, params)
    ref_params = reference_lib.stored(ref_params, config.model.reference)
  state = jax.jit(fresh, out_shardings=shardings, donate_argnums=0)(params)
  state = reference_lib.to_host(state.replace(reference=following), config)
  step = checkpoint.latest_step(checkpointer)
  if distributed.is_main():
    for name in run_directory.RECORDS:
      records.truncate_jsonl(directory / name, -1 if step is None else step)
    _say_room(run_storage.checkpoints(directory), state)
  print(
    f"{config.model.path}: {count / 1e6:.3g} million parameters on "
    f"{mesh.size} {mesh.devices.flat[0].platform} device(s)",
    flush=True,
  )
  policy = policy._replace(params=None)  # the state has them
  run = Run(
    config=config,
    directory=directory,
    policy=policy,
    mesh=mesh,
    shardings=shardings,
    ref_params=ref_params,
    reward_pool=reward_pool,
    greedy=samplers.make_sampler(config, policy, 1, Sampling(0.0), mesh),
    train=train,
    held_out=held_out,
  )
  return run, state, tx
