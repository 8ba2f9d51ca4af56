"""Mesh, models, optimizer and initial state of a run, from its settings."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import optax

from grpojax.core import meshes
from grpojax.core.losses.entropy import NAME, init_control
from grpojax.core.optim import OPTIMIZERS, SCHEDULES, decays
from grpojax.core.random_keys import seed_key
from grpojax.core.step import init_state
from grpojax.core.types import LM, Params, TrainState
from grpojax.models import sharding
from grpojax.runtime.cli.configs import config_error
from grpojax.training import policies
from grpojax.training.files.sources import files_of
from grpojax.training.policies import Policy
from grpojax.training.settings.run import TrainSettings


def make_mesh(
  settings: TrainSettings, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Makes the mesh of the training devices; ValueError if axes do not fit."""
  devices = list(jax.devices() if devices is None else devices)
  reserved = settings.mesh.sampling_devices
  devices = devices[: max(len(devices) - reserved, 0)]
  if not devices:
    remedy = "leaves no device for training: lower it"
    raise ValueError(config_error("mesh.sampling_devices", reserved, remedy))
  sizes = {axis: getattr(settings.mesh, axis) for axis in meshes.AXES}
  try:
    return meshes.make_mesh(**sizes, devices=devices)
  except ValueError as error:
    if not reserved:
      raise
    text = f"{error} (not counting {reserved} of mesh.sampling_devices)"
    raise ValueError(text) from None


def open_policy(settings: TrainSettings) -> Policy:
  """Opens the model without weights; ValueError if unsuitable for the loss."""
  model = settings.model
  files = files_of(settings)
  policy = policies.open_policy(
    files, model.dtype, model.remat, model.attention
  )
  check_model(settings, policy.lm)
  return policies.with_stop(policy, settings.sampling.stop)


def with_teacher(settings: TrainSettings, policy: Policy) -> Policy:
  """Adds the teacher without weights, if any; ValueError if unsuitable."""
  model = settings.model
  if not model.teacher:
    return policy
  try:
    files = files_of(settings, model.teacher)
    teacher = policies.open_policy(
      files, model.dtype, attention=model.attention
    )
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
      raise ValueError(
        "has different tokens from the policy: use a model of the same family"
      )
    ids = teacher.shape.vocab_size
    if ids < policy.shape.vocab_size:
      raise ValueError(
        f"has {ids} ids (vocab_size), fewer than the policy's "
        f"{policy.shape.vocab_size}: use a model with at least as many"
      )
  except ValueError as error:
    text = config_error("model.teacher", model.teacher, str(error))
    raise ValueError(text) from error
  return policy._replace(teacher=teacher)


def check_model(settings: TrainSettings, lm: LM) -> None:
  """Raises ValueError if the loss needs experts but the model has none."""
  for name, verb, off in (
    ("router_aux_coef", "balances", 0),
    ("router_replay", "replays", False),
  ):
    value = getattr(settings.loss, name)
    if value and not lm.has_experts:
      remedy = f"{verb} experts, but the model has none (model.path): use {off}"
      raise ValueError(config_error(f"loss.{name}", value, remedy))


def with_weights(
  settings: TrainSettings, policy: Policy, mesh: jax.sharding.Mesh | None = None
) -> Policy:
  """Loads the weights of a policy and its teacher; adds adapters, if any.

  Without a mesh uses a single device. ValueError if weights do not match.
  """
  shardings = mesh and functools.partial(sharding.shardings, mesh=mesh)
  dtype = settings.model.dtype
  if policy.teacher:
    teacher = policies.with_weights(policy.teacher, dtype, shardings)
    policy = policy._replace(teacher=teacher)
  if not settings.lora.rank:
    return policies.with_weights(policy, "float32", shardings)
  # Frozen weights get no updates, so model.dtype is precise enough.
  policy = policies.with_weights(policy, dtype, shardings)
  options = dataclasses.asdict(settings.lora)
  return policies.with_adapters(policy, seed_key(settings.seed), **options)


def learning_rate(settings: TrainSettings) -> optax.Schedule:
  """Returns the learning rate per update: linear warmup, then the schedule."""
  optim = settings.optim
  updates = settings.steps * optim.update.epochs * optim.update.minibatches
  decay = max(updates - optim.warmup_steps, 1)
  peak = optim.learning_rate
  schedule = SCHEDULES[optim.schedule](peak, decay)
  if not optim.warmup_steps:
    return schedule
  first = peak / (optim.warmup_steps + 1)  # not 0, to use the first update
  warmup = optax.linear_schedule(first, peak, optim.warmup_steps)
  return optax.join_schedules([warmup, schedule], [optim.warmup_steps])


def optimizer(settings: TrainSettings) -> optax.GradientTransformation:
  """Returns the optimizer with decoupled weight decay (`core.optim.decays`)."""
  optim = settings.optim
  scale = OPTIMIZERS[optim.name](
    b1=optim.b1,
    b2=optim.b2,
    moments_dtype=optim.moments_dtype,
    seed=settings.seed,
  )
  return optax.chain(
    scale,
    optax.add_decayed_weights(optim.weight_decay, mask=decays),
    optax.scale_by_learning_rate(learning_rate(settings)),
  )


def first_state(
  settings: TrainSettings, tx: optax.GradientTransformation, params: Params
) -> TrainState:
  """Returns a run's state before its first step."""
  state = init_state(params, tx, seed_key(settings.seed))
  control = init_control(settings.loss)
  return state if control is None else state.replace(extras={NAME: control})
