"""Batch of an update: advantages of the rewards, and packing."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from grpojax.core import meshes
from grpojax.core.advantages.multi_reward import AGGREGATIONS
from grpojax.core.batch import make_batch
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.packing import Packing
from grpojax.core.packing import layout as packing_layout
from grpojax.core.rollout import rollout_metrics
from grpojax.core.types import LM, Batch, Rollout
from grpojax.training.settings.inputs import RewardSettings
from grpojax.training.settings.run import TrainSettings


def reward_weights(reward: RewardSettings) -> Sequence[int | float]:
  """Returns the weights of the functions and of the reward model, if any."""
  return (*reward.weights, *([reward.model_weight] if reward.model else []))


def aggregation(
  reward: RewardSettings,
) -> Callable[[Float[Array, "K B G"]], Float[Array, "B G"]] | None:
  """Returns the aggregation of the functions' rewards; None for their sum."""
  function = AGGREGATIONS[reward.aggregation]
  weights = reward_weights(reward)
  return function and functools.partial(function, weights=weights)


def baseline_rewards(
  settings: TrainSettings,
  rollout: Rollout,
  rewards: Float[Array, "B G"],
  values: Float[Array, "K B G"] | None,
) -> Float[Array, "B G"]:
  """Returns the aggregated rewards from which advantages are computed.

  NaN excludes a completion from its group's baseline. `values` are the rewards
  of each function, if they are aggregated.
  """
  aggregate = aggregation(settings.reward)
  compared = rewards if aggregate is None else values
  # Normalisation excludes dropped completions, so they are dropped first.
  compared, _ = TRUNCATED[settings.loss.truncated](compared, rollout.finished)
  return compared if aggregate is None else aggregate(compared)


def in_baseline(
  settings: TrainSettings, rollout: Rollout, rewards: Float[np.ndarray, "B G"]
) -> Bool[np.ndarray, "B G"]:
  """Returns True for completions in their group's baseline, on the host."""
  rewarded = np.isfinite(rewards)
  if settings.loss.truncated == "drop":
    rewarded &= meshes.fetch(rollout.finished)
  return rewarded


def of_turns(
  reward: RewardSettings, rollout: Rollout, rewards: Float[Array, "B G"]
) -> Float[Array, "B G K"]:
  """Splits rewards by turn; functions' rewards count for the last turn."""
  weight = reward.weights[reward.functions.index("environment")]
  # The environment's rewards per turn, [B, G, K]; `rewards` has their sum.
  by_turn = weight * rollout.turn_rewards
  last = jnp.max(rollout.turns, axis=-1, keepdims=True)
  by_functions = rewards - jnp.sum(by_turn, axis=-1)
  # [B, G, K], True in the last turn of each trajectory.
  at_last = jnp.arange(by_turn.shape[-1]) == last
  return by_turn + jnp.where(at_last, by_functions[..., None], 0.0)


def plan_packing(
  settings: TrainSettings,
  rollout: Rollout,
  rewards: Float[np.ndarray, "B G"],
  mesh: jax.sharding.Mesh,
) -> Packing | None:
  """Packs the completions needed by the update into rows; None if off."""
  if not settings.optim.packing:
    return None
  needed = in_baseline(settings, rollout, rewards)
  # The baseline includes masked completions, so a KL penalty in the reward
  # needs their tokens.
  if settings.loss.truncated == "mask" and not settings.loss.kl_in_reward:
    needed &= meshes.fetch(rollout.finished)
  mask = meshes.fetch(rollout.completion_mask)
  prompt_mask = meshes.fetch(rollout.prompt_mask)
  planned = packing_layout.plan(
    # Completions of length 0 get no place in the rows.
    np.where(needed, np.sum(mask, axis=-1), 0),
    mask.shape[-1],
    np.sum(prompt_mask, axis=-1),
    prompt_mask.shape[-1],
    settings.optim.update.minibatches,
    settings.optim.update.micro_batches,
  )
  return meshes.place(planned, mesh, "batch")


def make_batch_program(settings: TrainSettings, ref_lm: LM | None = None):
  """Returns a function that computes the batch of an update, to be jitted.

  It is `(lm, params, rollout, rewards, *, values, scale, **options) -> (batch,
  metrics)`. `values` [K, B, G] are the rewards of each function, None if only
  their sum is compared; `scale` multiplies the clipped advantages; `options`
  are arrays of `make_batch`. `ref_lm` is the teacher, if any.
  """

  def batch_of(
    lm, params, rollout: Rollout, rewards, *, values=None, scale=None, **options
  ) -> tuple[Batch, dict[str, Array]]:
    compared = baseline_rewards(settings, rollout, rewards, values)
    credit = settings.environment.credit
    by_turn = compared
    if credit != "trajectory":
      by_turn = of_turns(settings.reward, rollout, compared)
    batch = make_batch(
      lm,
      rollout,
      by_turn,
      settings.loss,
      options=settings.optim.update,
      sampling=settings.sampling.distribution,
      policy_params=params,
      ref_lm=ref_lm,
      credit=credit,
      **options,
    )
    if scale is not None:
      batch = batch.replace(advantages=scale * batch.advantages)
    return batch, rollout_metrics(rollout, rewards, compared)

  return batch_of
