"""A training step in parts, with the reward on the host."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.batch import make_batch
from grpojax.core.grpo_step import diagnosis_key, rollout_metrics
from grpojax.core.types import Batch, Params, Prompts, Rollout, TrainState
from grpojax.core.update import make_update
from grpojax.rewards import groups
from grpojax.training import (
  corrections,
  dynamic_sampling,
  from_config,
  mixtures,
  prompt_choice,
  reference,
  sample_rows,
  samplers,
  sampling_parts,
  scoring,
)
from grpojax.training import diagnosis as diagnosis_lib
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy


def make_compare(config: ConfigDict):
  """The part of a step between the rewards and the update.

  Returns:
    `(lm, params, samples, rewards, ref_params, packing=None, score_norms=None,
    values=None, scale=None, weights=None) -> (batch, metrics)`, to be jitted:
    advantages, and log-probabilities under the reference. The values [K, B, G]
    of the reward functions are needed where `reward.aggregation` compares more
    than their sum; a scale is a factor of all advantages, once they are
    bounded; the weights are the prompts'.
  """
  options = from_config.update_options(config)
  recompute_logprobs = from_config.recompute_logprobs(config)
  aggregate = from_config.aggregation(config)

  def compare(
    lm,
    params,
    samples,
    rewards,
    ref_params,
    packing=None,
    score_norms=None,
    values=None,
    scale=None,
    weights=None,
  ):
    on_policy = options["epochs"] * options["minibatches"] == 1
    compared = corrections.compared_rewards(
      config, aggregate, samples, rewards, values
    )
    batch = make_batch(
      lm,
      samples,
      compared,
      from_config.advantage(config),
      ref_params,
      on_policy=on_policy,
      policy_params=params if recompute_logprobs and not on_policy else None,
      kl_in_reward=from_config.kl_in_reward(config),
      truncated=config.loss.truncated,
      advantage_clip=config.loss.advantage_clip or None,
      micro_batches=options["minibatches"] * options["micro_batches"],
      sampling=options["sampling"],
      chunk_size=options["chunk_size"],
      packing=packing,
      score_norms=score_norms,
      prompt_weights=weights,
    )
    if scale is not None:
      batch = batch.replace(advantages=scale * batch.advantages)
    return batch, rollout_metrics(samples, rewards, compared)

  return compare


def make_learn(config: ConfigDict, tx: optax.GradientTransformation):
  """The update: `(lm, state, batch) -> (state, metrics)`, to be jitted."""
  options = from_config.update_options(config)

  def learn(lm, state, batch):
    return make_update(lm, tx, **options)(state, batch)

  return learn


class Programs(NamedTuple):
  """What a step with a reward on the host compiles, each when first used.

  Attributes:
    sample: `(params, prompts, key) -> Rollout`, on the sampling mesh.
    compare: see `make_compare`.
    learn: see `make_learn`; the state is donated.
  """

  sample: Callable[..., Rollout]
  compare: Callable[..., tuple[Batch, dict[str, Array]]]
  learn: Callable[..., tuple[TrainState, dict[str, Array]]]


def make_programs(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Programs:
  """The programs of `make_host_step`, which see for the arguments."""
  sampling = from_config.sampling(config)
  return Programs(
    samplers.sampler_program(config, policy, group_size, sampling, budgets),
    policy_lib.jit(policy, make_compare(config)),
    policy_lib.jit(
      policy,
      make_learn(config, tx),
      donate_argnums=1,
      out_shardings=(shardings, None),
    ),
  )


def make_host_step(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  shardings: TrainState,
  reward_pool: scoring.RewardPool,
  check_signals: Callable[..., None],
  budgets: Callable[[Prompts], Array] | None = None,
):
  """A step whose rewards are computed on the host, from text.

  Args:
    config: the run's.
    policy: the model; the state has the parameters.
    group_size: G.
    tx: the optimizer.
    ref_params: the reference policy, or None; where it follows the policy, the
      state has it.
    shardings: shardings of the state, the same before and after each step.
    reward_pool: of the rewards.
    check_signals: called between the parts of a step (`together` with all
      processes, see `interrupts.sigterm_requests`) and all through them, but
      for the last, the update; may raise. Only that touches the state, so a
      step that it ends leaves no trace.
    budgets: see `samplers.sampler_program`.

  Returns:
    `(state, prompts, examples, diagnosed, take=None) -> (state, metrics,
    samples, failures)`. Where `diagnosed`, the metrics have those of
    `make_diagnose`, of the policy that sampled and of the prompts as they came.
    `take` gives more of them to dynamic sampling, see `dynamic_sampling.Take`.
    The metrics have `reward_counts` (`sample_rows.reward_counts`) beside their
    scalars; the samples are rows of samples.jsonl, none where they are not due;
    the failures are rewards that could not be computed.
  """
  programs = make_programs(config, policy, group_size, tx, shardings, budgets)
  mesh = mesh_lib.mesh_of(shardings)
  draw, fill = dynamic_sampling.make_draw(
    config,
    functools.partial(
      sampling_parts.make_rewarded_samples,
      config,
      policy,
      programs.sample,
      mesh,
      reward_pool,
      check_signals,
    ),
    mesh,
    check_signals,
    functools.partial(scoring.correctness, reward_pool),
  )
  advance_stream = dynamic_sampling.make_advance_stream(shardings)
  observe = prompt_choice.make_learn(config, shardings)
  aggregated = from_config.aggregation(config) is not None
  diagnose = policy_lib.jit(
    policy,
    diagnosis_lib.make_diagnose(
      config, mesh_lib.row_shards(mesh), policy.vmappable
    ),
  )

  def compared(state, samples, scores, rewards, ref, scale, weights):
    """The batch to learn from, and metrics of its completions."""
    packing = from_config.packing(config, samples, scores.rewards, mesh)
    values = scoring.stacked(scores) if aggregated else None
    values = mesh_lib.place(values, mesh, None, "batch", "group")
    args = state.params, samples, rewards, ref, packing, state.score_norms
    scale = mesh_lib.place(scale, mesh)
    return programs.compare(*args, values, scale, weights)

  def step(
    state: TrainState, prompts: Prompts, examples, diagnosed: bool, take=None
  ):
    clock = [time.perf_counter()]
    held, state = state.reference, state.replace(reference=None)
    key = jax.random.fold_in(state.key, state.step)
    given = state.params, prompts, examples, key, clock
    samples, _, scores = draw(*given)
    rewards = mesh_lib.place(scores.rewards, mesh, "batch", "group")
    check_signals(together=True)
    first = samples, scores, examples
    filled = fill(state.params, first, key, clock, take)
    score_metrics = scoring.metrics(filled.drawn) | filled.metrics
    of_all = filled.examples, filled.drawn.rewards
    score_metrics |= mixtures.metrics(config, *of_all)
    score_metrics |= prompt_choice.metrics(state, prompts, examples)
    if diagnosed:  # of the prompts as they came
      key = diagnosis_key(state)
      diagnosis = diagnose(
        state.params, samples, rewards, key, state.score_norms
      )
      policy_lib.wait(diagnosis, check_signals)
      score_metrics |= mesh_lib.fetch(diagnosis)
      clock.append(time.perf_counter())
      check_signals(together=True)
    batch = filled.samples, filled.scores
    if filled.scores is not scores:
      rewards = filled.scores.rewards
      rewards = mesh_lib.place(rewards, mesh, "batch", "group")
    ref = reference.to_device(ref_params if held is None else held)
    args = ref, filled.scale, prompts.weights
    batch, row = compared(state, *batch, rewards, *args)
    policy_lib.wait(batch, check_signals)
    clock.append(time.perf_counter())
    if state.difficulty is not None:
      right = scoring.correctness(reward_pool, scores, examples)
      state = observe(state, examples, right)
    due = sample_rows.is_due(config, int(mesh_lib.fetch(state.step)) + 1)
    state, of_update = programs.learn(state, batch)
    # While the devices are at the update.
    shown = sample_rows.of_batch(config, policy, filled, batch) if due else []
    counts = sample_rows.reward_counts(filled.drawn.rewards)
    score_metrics["reward_counts"] = counts
    state = advance_stream(state, filled.more_prompts)
    row = mesh_lib.fetch(row | of_update) | score_metrics
    clock.append(time.perf_counter())
    names = ["seconds_rollout", "seconds_rewards"]
    names += ["seconds_diagnosis"] * diagnosed
    names += ["seconds_reference", "seconds_update"]
    row |= dict(zip(names, np.diff(clock), strict=True))
    state = state.replace(reference=held)
    return state, row, shown, groups.all_failures(filled.drawn)

  return step
