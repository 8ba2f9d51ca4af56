"""Fresh prompts in the place of groups whose rewards do not vary (DAPO).

What it does to the objective, and what not: `core.dynamic_sampling`.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from grpojax.core import dynamic_sampling
from grpojax.core import mesh as mesh_lib
from grpojax.core.multi_reward import AGGREGATIONS
from grpojax.core.rollout import rollout_metrics
from grpojax.core.types import Params, Prompts, Rollout, TrainState
from grpojax.rewards import groups
from grpojax.training import corrections, from_config, scoring
from grpojax.training.filter_groups import settings_of

Take = Callable[[], tuple[Prompts, list[dict[str, Any]]]]
"""The next prompts of the stream, as many as a draw has."""


class ResampledBatch(NamedTuple):
  """A batch whose groups vary, and all that was drawn for it.

  Attributes:
    samples: the batch.
    scores: its rewards; nan in groups that do not vary, where the limit was
      met.
    drawn: the scores of all groups that were drawn, in their order.
    examples: of these groups.
    drawn_groups: [B], which of these groups the batch has.
    more_prompts: drawn beyond those of a step.
    scale: a factor of all advantages; None for 1.
    metrics: of all groups that were drawn, see `rollout_metrics`; none where
      they are the batch.
  """

  samples: Rollout
  scores: groups.GroupRewards
  drawn: groups.GroupRewards
  examples: list[dict[str, Any]]
  drawn_groups: Int[np.ndarray, "B"]
  more_prompts: int
  scale: np.float32 | None
  metrics: dict[str, Any]


def _rows(
  scores: groups.GroupRewards, rows: Int[np.ndarray, "B"]
) -> groups.GroupRewards:
  """Some of the groups."""
  return groups.GroupRewards(
    scores.rewards[rows],
    {name: values[rows] for name, values in scores.values.items()},
    scores.failed[rows],
    [scores.failures[row] for row in rows],
    {name: values[rows] for name, values in scores.extras.items()},
  )


def _joined(parts: Sequence[groups.GroupRewards]) -> groups.GroupRewards:
  """All groups, one part after another."""
  return groups.GroupRewards(
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


def _pooled(
  rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]
) -> dict[str, float]:
  """`rollout_metrics` of all groups from those of parts of them.

  Args:
    rows: of each part.
    sizes: groups of each part.
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
  rewarded = counts * (1 - columns["rewards_missing"])
  rewarded /= max(rewarded.sum(), 1e-30)
  mean, std = columns["reward_mean"], columns["reward_std"]
  row["reward_mean"] = rewarded @ mean
  square = rewarded @ (std**2 + (mean - row["reward_mean"]) ** 2)
  row["reward_std"] = np.sqrt(square)
  return {name: float(value) for name, value in row.items()}


def _varies(
  config: ConfigDict,
  samples: Rollout,
  scores: groups.GroupRewards,
  right: Float[np.ndarray, "B G"],
) -> Bool[np.ndarray, "B"]:
  """Which groups are learned from.

  Args:
    config: the run's.
    samples: of the groups.
    scores: their rewards.
    right: what says what a right answer is, see `scoring.correctness`.
  """
  if settings_of(config).metric == "acc":
    values = right[None]
  elif AGGREGATIONS[config.reward.aggregation] is None:
    values = scores.rewards[None]
  else:
    values = scoring.stacked(scores)
    values = values[np.array(from_config.reward_weights(config)) != 0]
  there = corrections.compared(config, samples, scores.rewards)
  varied = dynamic_sampling.varies(np.where(there, values, np.nan)).any(0)
  if config.loss.truncated != "keep":  # none that ends: none in the loss
    varied &= np.any(there & mesh_lib.fetch(samples.finished), axis=-1)
  return varied


def make_resample(
  config: ConfigDict,
  draw: Callable[..., tuple[Rollout, Any, groups.GroupRewards]],
  mesh: jax.sharding.Mesh,
  check_signals: Callable[..., None],
  correctness: Callable[..., Float[np.ndarray, "B G"]],
):
  """Replaces the groups of a batch that do not vary, as far as the limit goes.

  The groups of a draw take the free rows in the order of their prompts, so
  that a batch whose groups all vary stays as it is, and the batch depends on
  nothing but the state and the stream.

  Args:
    config: the run's.
    draw: of `sampling_parts.make_rewarded_samples`, for the prompts of a draw.
    mesh: of training.
    check_signals: called before each draw; may raise.
    correctness: `(scores, examples) -> [B, G]`, see `scoring.correctness`.

  Returns:
    `(params, first, key, clock, take) -> ResampledBatch`; `first` are the
    samples, scores and examples of all prompts of a step. Of the clock's last
    two times, when all samples were there and all rewards, the first moves by
    the seconds of sampling, the second to the end.
  """
  settings = settings_of(config)
  replace = jax.jit(dynamic_sampling.replace_groups)
  aggregate = from_config.aggregation(config)
  compared = functools.partial(corrections.compared_rewards, config, aggregate)

  @jax.jit
  def measure(samples, rewards, values):
    given = samples, rewards
    return rollout_metrics(*given, compared(*given, values))

  def measured(samples: Rollout, scores: groups.GroupRewards):
    rewards = mesh_lib.place(scores.rewards, mesh, "batch", "group")
    values = scoring.stacked(scores) if aggregate else None
    values = mesh_lib.place(values, mesh, None, "batch", "group")
    return measure(samples, rewards, values)

  def learned(samples: Rollout, scores, examples):
    return _varies(config, samples, scores, correctness(scores, examples))

  def resample_groups(params: Params, first, key, clock, take):
    samples, scores, examples = first
    size = total = len(scores.rewards)
    varied, asked = [learned(*first)], [*examples]
    drawn_groups, kept = np.arange(size), varied[0].copy()
    drawn, rows = [scores], [measured(samples, scores)]
    while total < settings.limit * size and not kept.all():
      check_signals(together=True)
      times = [time.perf_counter()]
      prompts, given = take()
      number = np.int32(total)
      more, _, found = draw(params, prompts, given, key, times, first=number)
      varied.append(learned(more, found, given))
      good, free = np.flatnonzero(varied[-1]), np.flatnonzero(~kept)
      pairs = list(zip(free, good, strict=False))
      source = np.full(size, -1, np.int32)
      for place, row in pairs:
        source[place], drawn_groups[place], kept[place] = row, total + row, True
      if pairs:
        samples = replace(samples, more, mesh_lib.place(source, mesh))
      drawn.append(found)
      asked += given
      rows.append(measured(more, found))
      total += len(found.rewards)
      clock[-2] += times[1] - times[0]
    everything = _joined(drawn)
    batch = _rows(everything, drawn_groups)
    rewards = np.where(kept[:, None], batch.rewards, np.float32(np.nan))
    sizes = [len(part.rewards) for part in drawn]
    accepted = dynamic_sampling.acceptance(np.concatenate(varied), size)
    row = _pooled(mesh_lib.fetch(rows), sizes) | {
      "gen_batches": total / size,
      "group_acceptance": accepted,
      "groups_kept": float(kept.mean()),
    }
    clock[-1] = time.perf_counter()
    scale = np.float32(accepted) if settings.rescale else None
    batch = batch._replace(rewards=rewards)
    more = total - size
    return ResampledBatch(
      samples, batch, everything, asked, drawn_groups, more, scale, row
    )

  return resample_groups


def make_draw(
  config: ConfigDict,
  make_rewarded_samples: Callable[..., Callable[..., Any]],
  mesh: jax.sharding.Mesh,
  check_signals: Callable[..., None],
  correctness: Callable[..., Float[np.ndarray, "B G"]],
):
  """How a step's prompts are sampled, and how groups of them are replaced.

  Args:
    config: the run's.
    make_rewarded_samples: `sampling_parts.make_rewarded_samples`, given the
      parts.
    mesh: of training.
    check_signals: see `make_resample`.
    correctness: likewise.

  Returns:
    What that makes for the prompts of a step; and what `make_resample` makes,
    or where dynamic sampling is off, the same of no consequence.
  """
  settings, draw = settings_of(config), make_rewarded_samples()
  if settings is None:

    def keep_groups(params, first, *_):
      samples, scores, examples = first
      drawn_groups = np.arange(len(examples))
      return ResampledBatch(
        samples, scores, scores, examples, drawn_groups, 0, None, {}
      )

    return draw, keep_groups
  again = draw if settings.parts == 1 else make_rewarded_samples(1)
  # Numbered from the start: a later draw is by the same program.
  first = functools.partial(draw, first=np.int32(0))
  return first, make_resample(config, again, mesh, check_signals, correctness)


def make_advance_stream(shardings: Any):
  """`(state, prompts) -> state`: so many more were taken from the stream.

  Args:
    shardings: shardings of the state.
  """
  place = shardings.prompts_consumed
  add = jax.jit(lambda count, more: count + more, out_shardings=place)

  def advance_stream(state: TrainState, prompts: int) -> TrainState:
    if not prompts:
      return state
    more = mesh_lib.place(np.int32(prompts), place.mesh)
    return state.replace(prompts_consumed=add(state.prompts_consumed, more))

  return advance_stream
