"""Fresh prompts in the place of groups whose rewards do not vary (DAPO).

What it does to the objective, and what not: `core.dynamic_sampling`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from grpojax.core import dynamic_sampling
from grpojax.core import mesh as mesh_lib
from grpojax.core.rollout import rollout_metrics
from grpojax.core.types import Params, Prompts, Rollout, TrainState
from grpojax.rewards import groups
from grpojax.rewards.groups import GroupRewards
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.batch import (
  aggregation,
  baseline_rewards,
  in_baseline,
  reward_weights,
)
from grpojax.training.step.rewards import (
  RewardPool,
  correctness,
  place_rewards,
  stack_values,
)
from grpojax.training.step.timer import Timer

Take = Callable[[], tuple[Prompts, list[dict[str, Any]]]]
"""The next prompts of the stream, as many as a draw has."""


class ResampledBatch(NamedTuple):
  """Batch whose groups vary, and all that was drawn for it.

  Attributes:
    rollout: Completions of the batch.
    rewards: Rewards of the batch; nan in groups that do not vary, where the
      limit was met.
    drawn: Rewards of all groups that were drawn, in their order.
    examples: Examples of all these groups.
    drawn_groups: Numbers [B] of the batch's groups among these.
    more_prompts: Number of prompts drawn beyond those of a step.
    scale: Factor of all advantages; None for 1.
    metrics: Metrics of all groups that were drawn.
  """

  rollout: Rollout
  rewards: GroupRewards
  drawn: GroupRewards
  examples: list[dict[str, Any]]
  drawn_groups: Int[np.ndarray, "B"]
  more_prompts: int = 0
  scale: np.float32 | None = None
  metrics: Mapping[str, Any] = {}


def as_drawn(
  rollout: Rollout, rewards: GroupRewards, examples: list[dict[str, Any]]
) -> ResampledBatch:
  """Returns the batch of a step that replaces no group."""
  numbers = np.arange(len(examples))
  return ResampledBatch(rollout, rewards, rewards, examples, numbers)


def _take_groups(rewards: GroupRewards, rows: Int[np.ndarray, "B"]):
  """Rewards of the groups of these numbers."""
  return GroupRewards(
    rewards.rewards[rows],
    {name: values[rows] for name, values in rewards.values.items()},
    rewards.failed[rows],
    [rewards.failures[row] for row in rows],
    {name: values[rows] for name, values in rewards.extras.items()},
  )


def _join_groups(parts: Sequence[GroupRewards]) -> GroupRewards:
  """Rewards of all groups, one part after another."""
  return GroupRewards(
    np.concatenate([part.rewards for part in parts]),
    {
      name: np.concatenate([part.values[name] for part in parts])
      for name in parts[0].values
    },
    np.concatenate([part.failed for part in parts]),
    [group for part in parts for group in part.failures],
    groups.joined_extras(
      [(len(part.rewards), part.extras) for part in parts],
      parts[0].rewards.shape[1],
    ),
  )


def pool_metrics(
  rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]
) -> dict[str, float]:
  """Pools the `rollout_metrics` of several draws.

  Args:
    rows: Metrics of each draw.
    sizes: Number of groups of each draw.
  """
  columns = {
    name: np.array([row[name] for row in rows], np.float64) for name in rows[0]
  }
  counts = np.array(sizes)
  row = {
    name: column.max()
    if name.endswith("_max")
    else counts @ column / counts.sum()
    for name, column in columns.items()
  }
  # Mean and spread of the rewards are over the samples that have one.
  rewarded = counts * (1 - columns["rewards_missing"])
  rewarded /= max(rewarded.sum(), 1e-30)
  mean, std = columns["reward_mean"], columns["reward_std"]
  row["reward_mean"] = rewarded @ mean
  square = rewarded @ (std**2 + (mean - row["reward_mean"]) ** 2)
  row["reward_std"] = np.sqrt(square)
  return {name: float(value) for name, value in row.items()}


def varying_groups(
  settings: TrainSettings,
  rollout: Rollout,
  rewards: GroupRewards,
  right: Float[np.ndarray, "B G"],
) -> Bool[np.ndarray, "B"]:
  """Returns True for the groups that teach something.

  Args:
    settings: Settings of the run.
    rollout: Completions.
    rewards: Rewards of them.
    right: Values of the function that says what a right answer is.
  """
  if settings.filter_groups.metric == "acc":
    values = right[None]
  elif aggregation(settings.reward) is None:
    values = rewards.rewards[None]
  else:
    values = stack_values(rewards)
    values = values[np.array(reward_weights(settings.reward)) != 0]
  counted = in_baseline(settings, rollout, rewards.rewards)
  varied = dynamic_sampling.varies(np.where(counted, values, np.nan)).any(0)
  if settings.loss.truncated != "keep":  # one that ends, or none is in the loss
    varied &= np.any(counted & mesh_lib.fetch(rollout.finished), axis=-1)
  return varied


def make_resample_groups(
  settings: TrainSettings,
  sample_and_reward: Callable[..., tuple[Rollout, GroupRewards]],
  mesh: jax.sharding.Mesh,
  reward_pool: RewardPool,
  check_signals: Callable[..., None],
):
  """Makes the replacement of groups that do not vary, as far as its limit goes.

  The groups of a draw take the free rows in the order of their prompts, so that
  a batch whose groups all vary stays as it is, and the batch depends on nothing
  but the state and the stream.

  Args:
    settings: Settings of the run.
    sample_and_reward: Function of `rewards.make_sample_and_reward`, for the
      prompts of a draw.
    mesh: Mesh of training.
    reward_pool: Functions and model.
    check_signals: Function that is called before each draw; may raise.

  Returns:
    `(params, batch, key, timer, take) -> ResampledBatch`, where `batch` is from
    `as_drawn`.
  """
  filtering = settings.filter_groups
  replace = jax.jit(dynamic_sampling.replace_groups)

  @jax.jit
  def measure(rollout, rewards, values):
    compared = baseline_rewards(settings, rollout, rewards, values)
    return rollout_metrics(rollout, rewards, compared)

  def measured(rollout: Rollout, rewards: GroupRewards):
    return measure(rollout, *place_rewards(settings, rewards, mesh))

  def vary(rollout: Rollout, rewards: GroupRewards, examples):
    right = correctness(reward_pool, rewards, examples)
    return varying_groups(settings, rollout, rewards, right)

  def resample_groups(
    params: Params, batch: ResampledBatch, key, timer: Timer, take: Take
  ) -> ResampledBatch:
    rollout, examples = batch.rollout, [*batch.examples]
    size = total = len(batch.rewards.rewards)
    varied = [vary(rollout, batch.rewards, examples)]
    numbers, good = np.arange(size), varied[0].copy()
    drawn, rows = [batch.rewards], [measured(rollout, batch.rewards)]
    while total < filtering.max_num_gen_batches * size and not good.all():
      check_signals(together=True)
      timer("rewards")  # what comes next is a part of the rollout
      prompts, new_examples = take()
      new, new_rewards = sample_and_reward(
        params, prompts, new_examples, key, timer, np.int32(total)
      )
      varied.append(vary(new, new_rewards, new_examples))
      # Groups that vary go to the free rows, as long as there are both.
      free, varying = np.flatnonzero(~good), np.flatnonzero(varied[-1])
      source = np.full(size, -1, np.int32)
      for row, group in zip(free, varying, strict=False):
        source[row], numbers[row], good[row] = group, total + group, True
      if (source >= 0).any():
        rollout = replace(rollout, new, mesh_lib.place(source, mesh))
      drawn.append(new_rewards)
      examples += new_examples
      rows.append(measured(new, new_rewards))
      total += len(new_rewards.rewards)
    everything = _join_groups(drawn)
    rewards = _take_groups(everything, numbers)
    accepted = dynamic_sampling.acceptance(np.concatenate(varied), size)
    metrics = pool_metrics(
      mesh_lib.fetch(rows), [len(part.rewards) for part in drawn]
    ) | {
      "gen_batches": total / size,
      "group_acceptance": accepted,
      "groups_kept": float(good.mean()),
    }
    timer("rewards")
    return ResampledBatch(
      rollout=rollout,
      rewards=rewards._replace(
        rewards=np.where(good[:, None], rewards.rewards, np.float32(np.nan))
      ),
      drawn=everything,
      examples=examples,
      drawn_groups=numbers,
      more_prompts=total - size,
      scale=np.float32(accepted) if filtering.rescale else None,
      metrics=metrics,
    )

  return resample_groups


def make_advance_stream(shardings: TrainState):
  """Makes `(state, prompts) -> state`: so many more left the stream.

  Args:
    shardings: Shardings of the state.
  """
  sharding = shardings.prompts_consumed
  add = jax.jit(lambda count, more: count + more, out_shardings=sharding)

  def advance_stream(state: TrainState, prompts: int) -> TrainState:
    if not prompts:
      return state
    more = mesh_lib.place(np.int32(prompts), sharding.mesh)
    return state.replace(prompts_consumed=add(state.prompts_consumed, more))

  return advance_stream
