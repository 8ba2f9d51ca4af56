"""Replacement of zero-variance groups (DAPO, see `core.dynamic_sampling`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from grpojax.core import dynamic_sampling, group_axis, meshes, rows
from grpojax.core.rollout import rollout_metrics
from grpojax.core.types import Rollout
from grpojax.rewards.pool import GroupRewards
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import batch as batch_lib
from grpojax.training.step import scoring
from grpojax.training.step.draws import Draw, draw
from grpojax.training.step.extension import Extension, Inputs, with_metrics

NAME = "dynamic_sampling"


def pool_metrics(
  rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]
) -> dict[str, float]:
  """Combines the `rollout_metrics` of draws that have `sizes` groups."""
  columns = {
    name: np.array([row[name] for row in rows], np.float64) for name in rows[0]
  }
  counts = np.array(sizes)
  # Means are weighted by the groups of each draw; maxima stay maxima.
  row = {name: counts @ x / counts.sum() for name, x in columns.items()}
  row |= {name: x.max() for name, x in columns.items() if name.endswith("_max")}
  # The reward's mean and standard deviation are over samples with a reward.
  rewarded = counts * (1 - columns["rewards_missing"])
  rewarded /= max(rewarded.sum(), 1e-30)
  mean, std = columns["reward_mean"], columns["reward_std"]
  row["reward_mean"] = rewarded @ mean
  # The variance within draws plus the variance of their means.
  square = rewarded @ (std**2 + (mean - row["reward_mean"]) ** 2)
  row["reward_std"] = np.sqrt(square)
  return {name: float(value) for name, value in row.items()}


def varying_groups(
  settings: TrainSettings,
  rollout: Rollout,
  rewards: GroupRewards,
  right: Float[np.ndarray, "B G"],
) -> Bool[np.ndarray, "B"]:
  """Returns True for groups in which the metric of filter_groups varies."""
  # [K, B, G] of K functions, or of their sum (K = 1); any of the K may vary.
  if settings.filter_groups.metric == "acc":
    values = right[None]
  elif batch_lib.aggregation(settings.reward) is None:
    values = rewards.rewards[None]
  else:
    values = scoring.stack_values(rewards)
    # Functions of weight 0 do not count.
    values = values[np.array(batch_lib.reward_weights(settings.reward)) != 0]
  counted = batch_lib.in_baseline(settings, rollout, rewards.rewards)
  varied = group_axis.varies(np.where(counted, values, np.nan)).any(0)
  if settings.loss.truncated != "keep":
    # A group without finished completions has no gradient.
    varied &= np.any(counted & meshes.fetch(rollout.finished), axis=-1)
  return varied


def _refill(
  varied: Bool[np.ndarray, "B"],
  numbers: Int[np.ndarray, "B"],
  varying: Bool[np.ndarray, "M"],
  drawn: int,
) -> Int[np.ndarray, "B"]:
  """Gives the places of groups without variance to new groups that vary.

  Updates the batch's flags and its groups' numbers among all drawn groups, of
  which `drawn` came before the new ones. Returns the new group of each place,
  or -1.
  """
  source = np.full(len(varied), -1, np.int32)
  free = np.flatnonzero(~varied)
  for place, group in zip(free, np.flatnonzero(varying), strict=False):
    source[place] = group
    numbers[place] = drawn + group
    varied[place] = True
  return source


def extension(inputs: Inputs) -> Extension | None:
  """Replaces zero-variance groups with new groups; None if it is off.

  It draws at most `max_num_gen_batches` batches, the first one included. New
  groups are used in the order of their prompts, so results do not depend on
  timing.
  """
  settings = inputs.settings
  filtering = settings.filter_groups
  if not filtering.enable:
    return None

  replace = jax.jit(dynamic_sampling.replace_groups)

  @jax.jit
  def measure(rollout, rewards, values):
    compared = batch_lib.baseline_rewards(settings, rollout, rewards, values)
    return rollout_metrics(rollout, rewards, compared)

  def inspect(new: Draw) -> tuple[Bool[np.ndarray, "B"], Mapping[str, Any]]:
    right = scoring.correctness(inputs.reward_pool, new.rewards, new.examples)
    varied = varying_groups(settings, new.rollout, new.rewards, right)
    placed = scoring.place_rewards(settings, new.rewards, inputs.mesh)
    return varied, measure(new.rollout, *placed)

  def after_draw(state, drawn, context):
    source = context.source
    if filtering.gen_parts > 1:
      source = source._replace(parts=1)
    rollout, rewards, examples, _ = drawn.batch
    size = len(examples)
    every = [rewards]
    inspected = [inspect(drawn.batch)]
    used = inspected[0][0].copy()
    numbers = np.arange(size)
    while (
      len(examples) < filtering.max_num_gen_batches * size and not used.all()
    ):
      inputs.check_signals(together=True)
      context.timer("rewards")  # the time from here on counts as rollout
      # Draw and reward new prompts.
      new = draw(
        *(source, state.params, *context.take(), context.key),
        *(context.timer, np.int32(len(examples))),
      ).collect()
      inspected.append(inspect(new))
      places = _refill(used, numbers, inspected[-1][0], len(examples))
      if (places >= 0).any():
        rollout = replace(
          rollout, new.rollout, meshes.place(places, inputs.mesh)
        )
      examples = examples + new.examples
      every.append(new.rewards)
    varied, measured = zip(*inspected, strict=True)
    rewards = scoring.join_groups(every)
    batch = Draw(
      rollout, rows.take(rewards, numbers), [examples[i] for i in numbers]
    )
    accepted = dynamic_sampling.acceptance(np.concatenate(varied), size)
    # For filter_groups.rescale: gradients as large as without the filter.
    scale = accepted
    if settings.loss.advantage == "batch_std":
      scale = dynamic_sampling.batch_std_scale(
        accepted, int(used.sum()), size, rewards.rewards.shape[-1]
      )
    metrics = pool_metrics(meshes.fetch(measured), [*map(len, varied)]) | {
      "gen_batches": len(examples) / size,
      "group_acceptance": accepted,
      "groups_kept": float(used.mean()),
    }
    context.timer("rewards")
    drawn = drawn._replace(
      batch=batch,
      rewards=rewards,
      examples=examples,
      used=used,
      scale=np.float32(scale) if filtering.rescale else None,
    )
    return with_metrics(drawn, metrics)

  def after_update(state, drawn, metrics):
    del metrics
    more = len(drawn.examples) - len(drawn.batch.examples)
    if not more:
      return state
    more = meshes.place(np.int32(more), inputs.mesh)
    count = meshes.run_like(jnp.add, state.prompts_consumed, more)
    return state.replace(prompts_consumed=count)

  return Extension(after_draw=after_draw, after_update=after_update)
