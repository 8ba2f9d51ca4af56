"""Batch of an update: rewards to compute advantages from, and packing."""

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
  """Returns the function that combines K rewards; None if they are summed."""
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
  per function if `aggregation` combines them, else None.
  """
  aggregate = aggregation(settings.reward)
  compared = rewards if aggregate is None else values
  # Drop truncated completions before an aggregation normalises a group.
  compared, _ = TRUNCATED[settings.loss.truncated](compared, rollout.finished)
  return compared if aggregate is None else aggregate(compared)


def in_baseline(
  settings: TrainSettings, rollout: Rollout, rewards: Float[np.ndarray, "B G"]
) -> Bool[np.ndarray, "B G"]:
  """Returns True for completions counted in their group's baseline."""
  rewarded = np.isfinite(rewards)
  if settings.loss.truncated == "drop":
    rewarded &= meshes.fetch(rollout.finished)
  return rewarded


def rewards_by_turn(
  reward: RewardSettings, rollout: Rollout, rewards: Float[Array, "B G"]
) -> Float[Array, "B G K"]:
  """Splits rewards by turn; rewards of functions count in the last turn."""
  weight = reward.weights[reward.functions.index("environment")]
  # The environment's rewards per turn, [B, G, K]; `rewards` includes their sum.
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
  """Plans how an update's completions share rows; None without packing."""
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
    # The plan leaves out completions of length 0.
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
  metrics)`. `values` [K, B, G] are the rewards per function, None if they are
  summed; `scale` multiplies the clipped advantages; `options` are passed on to
  `make_batch`. `ref_lm` is the teacher, if any.
  """

  def compute_batch(
    lm, params, rollout: Rollout, rewards, *, values=None, scale=None, **options
  ) -> tuple[Batch, dict[str, Array]]:
    compared = baseline_rewards(settings, rollout, rewards, values)
    credit = settings.environment.credit
    by_turn = compared
    if credit != "trajectory":
      by_turn = rewards_by_turn(settings.reward, rollout, compared)
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

  return compute_batch
