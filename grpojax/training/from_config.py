"""From a config to functions: where the names in a config get their meaning.

Each name is looked up in the dict that stands beside the functions it names,
and what a function asks for by its parameters' names is bound (`core.binding`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Float
from ml_collections import ConfigDict

from grpojax.core import losses, packing_layout
from grpojax.core import mesh as mesh_lib
from grpojax.core.advantages import ADVANTAGES
from grpojax.core.binding import bind
from grpojax.core.decoding import Decoding
from grpojax.core.entropy import EntropyBonus, init_control
from grpojax.core.grpo_step import OLD_LOGPROBS, init_state
from grpojax.core.kl import PLACEMENTS
from grpojax.core.multi_reward import AGGREGATIONS
from grpojax.core.packing import Packing
from grpojax.core.sampling import Sampling
from grpojax.core.surrogates import RATIOS, SURROGATES
from grpojax.core.types import Params, Rollout, TrainState
from grpojax.models import sharding
from grpojax.statistics import group_size as group_size_lib
from grpojax.training import (
  corrections,
  group_sizes,
  loss_settings,
  score_norms,
  sources,
)
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy


def mesh(
  config: ConfigDict, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """The config's mesh of all devices.

  Raises:
    ValueError: its axes do not multiply to their number.
  """
  sizes = {axis: config.mesh[axis] for axis in mesh_lib.AXES}
  return mesh_lib.make_mesh(**sizes, devices=devices)


def open_policy(config: ConfigDict) -> Policy:
  """The config's model, without its weights.

  Raises:
    ValueError: the directory, its configuration or its tokenizer do not fit, or
      a loss that is not for such a model.
  """
  model = config.model
  path = sources.model(config)
  policy = policy_lib.open_policy(path, model.dtype, model.remat)
  loss_settings.check_model(config.loss.router_aux_coef, policy.lm)
  return policy


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
    return policy_lib.with_weights(policy, "float32", place)
  # Nothing is added to frozen weights, so they need no more digits than what is
  # computed with them.
  policy = policy_lib.with_weights(policy, config.model.dtype, place)
  return policy_lib.with_adapters(
    policy,
    jax.random.key(config.seed),
    rank=rank,
    alpha=alpha,
    targets=targets,
  )


def sampling(config: ConfigDict) -> Sampling:
  """The sampling distribution of training."""
  s = config.sampling
  return Sampling(
    s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty
  )


def decoding(config: ConfigDict) -> Decoding:
  """How the token loop is run."""
  s = config.sampling
  return Decoding(s.stages, s.compact, s.slots)


def advantage(config: ConfigDict) -> Callable[..., jax.Array]:
  """Rewards [..., G] -> advantages [..., G]; see `core.advantages`."""
  options = {"k": config.subset_size, "power": config.score_power}
  return bind(ADVANTAGES[config.advantage], **options)


def aggregation(config: ConfigDict) -> Callable[..., jax.Array] | None:
  """Rewards of each function [K, B, G] -> [B, G]; None is their pool's sum.

  The reward model is the last of the functions, see `scoring.stacked`.
  """
  function = AGGREGATIONS[config.reward.aggregation]
  weights = reward_weights(config)
  return function and functools.partial(function, weights=weights)


def reward_weights(config: ConfigDict) -> list[int | float]:
  """Of the functions, and last of the reward model if there is one."""
  of_model = [config.reward.model_weight] * bool(config.reward.model)
  return [*config.reward.weights, *of_model]


def first_state(
  config: ConfigDict, tx: optax.GradientTransformation, params: Params
) -> TrainState:
  """The state before the first step of a run."""
  state = init_state(params, tx, jax.random.key(config.seed))
  state = state.replace(
    entropy=init_control(entropy_bonus(config)),
    score_norms=score_norms.first(config),
  )
  if config.group_size != group_sizes.AUTO:
    return state
  start = config.auto_group_size.start
  return state.replace(group_size=group_size_lib.init_choice(start))


def observe(config: ConfigDict):
  """`group_size.observe` with the config's settings.

  It takes the choice so far and a diagnosis, and returns the next choice.
  """
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


def recompute_logprobs(config: ConfigDict) -> bool:
  """Whether the trainer computes the old log-probabilities."""
  return OLD_LOGPROBS[config.loss.old_logprobs]


def loss(config: ConfigDict) -> Callable[..., Any]:
  """`losses.grpo_loss` with the config's ratio, surrogate and KL term."""
  given = config.loss
  offered = {name: given[name] for name in given}
  offered |= {"dual_clip": given.dual_clip or None}
  surrogate = bind(SURROGATES[given.surrogate], **offered)
  options = {"ratio": RATIOS[given.ratio], "surrogate": surrogate}
  kl = PLACEMENTS[given.kl_placement].get(given.kl)  # any, where beta = 0
  if given.beta > 0 and given.kl_placement != "reward":
    correction = given.kl_placement == "ratio"
    options |= {"kl": kl, "beta": given.beta, "kl_correction": correction}
  return functools.partial(losses.grpo_loss, **options)


def entropy_bonus(config: ConfigDict) -> EntropyBonus | None:
  """The bonus for entropy; None where there is none."""
  given = config.loss
  bonus = EntropyBonus(
    coefficient=given.entropy_coef,
    target=given.entropy_target or None,
    step=given.entropy_coef_delta,
    largest=given.entropy_coef_max,
  )
  return bonus if bonus.coefficient or bonus.target else None


def update_options(config: ConfigDict) -> dict[str, Any]:
  """Keyword arguments of `make_update` that say what is optimized and how."""
  optim = config.optim
  return {
    "loss": loss(config),
    "weighting": bind(
      losses.WEIGHTINGS[config.loss.weighting],
      length=config.sampling.max_new_tokens,
    ),
    "correction": corrections.correction(config),
    "epochs": optim.epochs,
    "minibatches": optim.minibatches,
    "micro_batches": optim.micro_batches,
    "max_grad_norm": optim.max_grad_norm,
    "entropy_bonus": entropy_bonus(config),
    "top_entropy_quantile": config.loss.top_entropy_quantile,
    "router_aux_coef": config.loss.router_aux_coef,
    "sampling": sampling(config),
    "chunk_size": config.logits_chunk,
  }


def packing(
  config: ConfigDict,
  samples: Rollout,
  rewards: Float[np.ndarray, "B G"],
  mesh: jax.sharding.Mesh,
) -> Packing | None:
  """How completions that have a reward share rows, see `packing_layout`.

  Args:
    config: the run's; `optim.packing` and how training cuts its batches.
    samples: of a step; their mask is on the host since they became text.
    rewards: one a completion.
    mesh: of training, in context; where to put the packing.
  """
  if not config.optim.packing:
    return None
  mask = mesh_lib.fetch(samples.completion_mask)
  read = corrections.read_by_training(config, samples, rewards)
  lengths = np.where(read, np.sum(mask, axis=-1), 0)
  cuts = config.optim.minibatches, config.optim.micro_batches
  prompt_mask = mesh_lib.fetch(samples.prompt_mask)
  prompts = np.sum(prompt_mask, axis=-1), prompt_mask.shape[-1]
  planned = packing_layout.plan(lengths, mask.shape[-1], *prompts, *cuts)
  return mesh_lib.place(planned, mesh, "batch")
