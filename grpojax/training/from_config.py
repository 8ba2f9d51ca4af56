"""From a config to functions: where the names in a config get their meaning.

The programs share this; nothing below them reads a config.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from grpojax.core import advantages, losses
from grpojax.core import kl as kl_lib
from grpojax.core.grpo_step import init_state
from grpojax.core.rollout import rollout
from grpojax.core.sampling import Sampling
from grpojax.core.types import Params, TrainState
from grpojax.runtime import sharding
from grpojax.statistics import group_size as group_size_lib
from grpojax.training import policy as policies
from grpojax.training import validation
from grpojax.training.policy import Policy


def open_policy(config: ConfigDict) -> Policy:
  """The config's model, without its weights.

  Raises:
    ValueError: the directory, its configuration or its tokenizer do not fit.
  """
  model = config.model
  return policies.open_policy(model.path, model.dtype, model.remat)


def with_weights(
  config: ConfigDict, policy: Policy, mesh: jax.sharding.Mesh | None = None
) -> Policy:
  """The policy with its weights, and adapters if they are asked for.

  Args:
    config: the run's.
    policy: from `open_policy`.
    mesh: where to load them; None is one device.

  Raises:
    ValueError: weights or targets of adapters that do not fit.
  """
  place = mesh and functools.partial(sharding.shardings, mesh=mesh)
  rank, alpha, targets = (config.lora[k] for k in ("rank", "alpha", "targets"))
  if not rank:
    return policies.with_weights(policy, "float32", place)
  # Nothing is added to frozen weights, so they need no more digits than what is
  # computed with them.
  policy = policies.with_weights(policy, config.model.dtype, place)
  return policies.with_adapters(
    policy,
    jax.random.key(config.seed),
    rank=rank,
    alpha=alpha,
    targets=targets,
  )


def sampling(config: ConfigDict) -> Sampling:
  """The sampling distribution of training."""
  s = config.sampling
  return Sampling(s.temperature, s.top_k, s.top_p, s.min_p)


def advantage(config: ConfigDict) -> Callable[..., jax.Array]:
  """Rewards [..., G] -> advantages [..., G]; see `make_batch` for lengths."""
  function, k = getattr(advantages, config.advantage), config.subset_size
  if config.advantage in ("max_at_k", "min_at_k"):
    return functools.partial(function, k=k)
  return function


def optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """AdamW under the config's schedule."""
  optim, steps = config.optim, config.steps
  updates = steps * optim.epochs * optim.minibatches
  decay = max(updates - optim.warmup_steps, 1)
  peak = optim.learning_rate
  shapes = {
    "constant": optax.constant_schedule(peak),
    "linear": optax.linear_schedule(peak, 0.0, decay),
    "cosine": optax.cosine_decay_schedule(peak, decay),
  }
  schedule = shapes[optim.schedule]
  if optim.warmup_steps:  # from the first update on: none of them is at 0
    first = peak / (optim.warmup_steps + 1)
    warmup = optax.linear_schedule(first, peak, optim.warmup_steps)
    schedule = optax.join_schedules([warmup, schedule], [optim.warmup_steps])
  return optax.adamw(
    schedule, b1=optim.b1, b2=optim.b2, weight_decay=optim.weight_decay
  )


def first_state(
  config: ConfigDict, tx: optax.GradientTransformation, params: Params
) -> TrainState:
  """The state before the first step of a run."""
  state = init_state(params, tx, jax.random.key(config.seed))
  if config.group_size != validation.AUTO:
    return state
  start = config.auto_group_size.start
  return state.replace(group_size=group_size_lib.init_choice(start))


def adapt(config: ConfigDict):
  """What follows from a diagnosis: `group_size.observe`, with its settings."""
  auto = config.auto_group_size
  return functools.partial(
    group_size_lib.observe,
    smallest=auto.smallest,
    largest=auto.largest,
    decay=auto.decay,
    margin=auto.margin,
    confidence=auto.confidence,
  )


def needs_reference(config: ConfigDict) -> bool:
  """Whether a reference policy is held in memory."""
  return config.loss.beta > 0


def kl_in_reward(config: ConfigDict) -> float:
  """beta, where the KL penalty is part of the reward; else 0."""
  return config.loss.beta if config.loss.kl_placement == "reward" else 0.0


def update_options(config: ConfigDict) -> dict[str, Any]:
  """Keyword arguments of `make_update` that say what is optimized and how."""
  loss, optim = config.loss, config.optim
  weighting = getattr(losses, loss.weighting)
  if loss.weighting == "fixed_length":
    weighting = functools.partial(
      weighting, length=config.sampling.max_new_tokens
    )
  in_loss = loss.beta > 0 and loss.kl_placement != "reward"
  return {
    "loss": functools.partial(
      losses.grpo_loss,
      ratio=getattr(losses, loss.ratio),
      clip_low=loss.clip_low,
      clip_high=loss.clip_high,
      dual_clip=loss.dual_clip or None,
      kl=getattr(kl_lib, loss.kl),
      beta=loss.beta if in_loss else 0.0,
      kl_correction=loss.kl_placement == "ratio",
    ),
    "weighting": weighting,
    "epochs": optim.epochs,
    "minibatches": optim.minibatches,
    "micro_batches": optim.micro_batches,
    "max_grad_norm": optim.max_grad_norm,
    "sampling": sampling(config),
    "chunk_size": config.logits_chunk,
  }


def make_sampler(config: ConfigDict, policy: Policy, group_size: int, sampling):
  """`(params, prompts, key) -> Rollout`, jitted."""
  return policies.jit(
    policy,
    functools.partial(
      rollout,
      group_size=group_size,
      max_new_tokens=config.sampling.max_new_tokens,
      eos_ids=policy.eos_ids,
      pad_id=policy.pad_id,
      sampling=sampling,
    ),
  )
