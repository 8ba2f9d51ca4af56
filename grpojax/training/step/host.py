"""Training step with rewards on the host: its parts, in their order.

    sample -> reward -> (resample groups) -> (diagnose) -> make batch -> update

Each part is a program that is compiled when it is first used. Only the update
touches the state, so that a step which a signal ends before it leaves no trace.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array

from grpojax.core import mesh as mesh_lib
from grpojax.core.step import diagnosis_key
from grpojax.core.types import Batch, Params, Prompts, Rollout, TrainState
from grpojax.core.update import make_update
from grpojax.rewards import groups
from grpojax.training import policy as policy_lib
from grpojax.training.data import mixtures
from grpojax.training.policy import Policy
from grpojax.training.report import sample_rows
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import difficulty, reference, resampling
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step.batch import (
  aggregation,
  make_batch_program,
  plan_packing,
)
from grpojax.training.step.diagnosis import make_diagnose
from grpojax.training.step.rewards import RewardPool
from grpojax.training.step.sampling import on_sampling_mesh, sampler_program
from grpojax.training.step.timer import Timer


class Programs(NamedTuple):
  """Compiled parts of a step.

  Attributes:
    sample: `(params, prompts, key) -> Rollout`, on the sampling mesh.
    make_batch: `(params, rollout, rewards, **options) -> (batch, metrics)`, see
      `batch.make_batch_program`.
    update: `(state, batch) -> (state, metrics)`; the state is donated.
  """

  sample: Callable[..., Rollout]
  make_batch: Callable[..., tuple[Batch, dict[str, Array]]]
  update: Callable[..., tuple[TrainState, dict[str, Array]]]


class StepResult(NamedTuple):
  """Result of a step.

  Attributes:
    state: State after it.
    metrics: Scalars by name, and `reward_counts` (`sample_rows.reward_counts`).
    sample_rows: Rows of samples.jsonl; none where they are not due.
    failures: Rewards that could not be computed.
  """

  state: TrainState
  metrics: dict[str, Any]
  sample_rows: list[dict[str, Any]]
  failures: list[Any]


def make_programs(
  settings: TrainSettings,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Programs:
  """Makes the programs of a step; arguments as of `make_host_step`."""
  sampling = settings.sampling.distribution

  def update(lm, state, batch):
    options = settings.optim.update
    return make_update(lm, tx, settings.loss, options, sampling)(state, batch)

  return Programs(
    sampler_program(settings, policy, group_size, sampling, budgets),
    policy_lib.jit(policy, make_batch_program(settings)),
    policy_lib.jit(
      policy, update, donate_argnums=1, out_shardings=(shardings, None)
    ),
  )


def make_host_step(
  settings: TrainSettings,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  shardings: TrainState,
  reward_pool: RewardPool,
  check_signals: Callable[..., None],
  budgets: Callable[[Prompts], Array] | None = None,
) -> Callable[..., StepResult]:
  """Makes a step whose rewards are computed on the host, from text.

  Args:
    settings: Settings of the run.
    policy: Model; the state has the parameters.
    group_size: Completions a prompt, G.
    tx: Optimizer.
    ref_params: Reference policy, or None; where it follows the policy, the
      state has it.
    shardings: Shardings of the state, the same before and after each step.
    reward_pool: Functions and model that compute rewards.
    check_signals: Function that is called between the parts of a step
      (`together` with all processes, see `preemption.install`) and all through
      them, but for the last, the update; may raise.
    budgets: Prompts -> [B, G], tokens that each sample may spend, or None.

  Returns:
    `(state, prompts, examples, diagnosed, take) -> StepResult`. Where
    `diagnosed`, the metrics have those of `make_diagnose`, of the policy that
    sampled and of the prompts as they came. `take` gives more prompts to
    dynamic sampling, see `resampling.Take`.
  """
  mesh = mesh_lib.mesh_of(shardings)
  programs = make_programs(settings, policy, group_size, tx, shardings, budgets)
  sampler = on_sampling_mesh(
    programs.sample, mesh, settings.mesh.sampling_tensor
  )

  def sample_and_reward(parts: int):
    return rewards_lib.make_sample_and_reward(
      policy, sampler, mesh, reward_pool, check_signals, parts
    )

  sample_parts = sample_and_reward(settings.sampling.parts)
  resample_groups = advance_stream = first_prompt = None
  if settings.filter_groups.enable:
    # A later draw is by the same program, where its prompts are as many.
    whole = settings.filter_groups.gen_parts == 1
    resample_groups = resampling.make_resample_groups(
      settings,
      sample_parts if whole else sample_and_reward(1),
      mesh,
      reward_pool,
      check_signals,
    )
    advance_stream = resampling.make_advance_stream(shardings)
    first_prompt = np.int32(0)
  shards = mesh_lib.row_shards(mesh)
  diagnose = policy_lib.jit(
    policy, make_diagnose(settings, shards, policy.vmappable)
  )
  update_success_rates = difficulty.make_update_success_rates(
    settings, shardings
  )
  aggregates = aggregation(settings.reward) is not None

  def make_batch(state, batch, prompts, reference_params):
    """The batch of the update, and metrics of its completions."""
    rewards = batch.rewards
    values = rewards_lib.stack_values(rewards) if aggregates else None
    return programs.make_batch(
      state.params,
      batch.rollout,
      mesh_lib.place(rewards.rewards, mesh, "batch", "group"),
      ref_params=reference.to_device(reference_params),
      packing=plan_packing(settings, batch.rollout, rewards.rewards, mesh),
      score_norms=state.score_norms,
      values=mesh_lib.place(values, mesh, None, "batch", "group"),
      scale=mesh_lib.place(batch.scale, mesh),
      prompt_weights=prompts.weights,
    )

  def step(
    state: TrainState,
    prompts: Prompts,
    examples: list[dict[str, Any]],
    diagnosed: bool = False,
    take: resampling.Take | None = None,
  ) -> StepResult:
    timer = Timer()
    # A reference that follows the policy is not an argument of the update.
    following, state = state.reference, state.replace(reference=None)
    key = jax.random.fold_in(state.key, state.step)
    rollout, rewards = sample_parts(
      state.params, prompts, examples, key, timer, first_prompt
    )
    check_signals(together=True)
    batch = resampling.as_drawn(rollout, rewards, examples)
    if resample_groups is not None:
      batch = resample_groups(state.params, batch, key, timer, take)
    metrics = rewards_lib.metrics(batch.drawn) | batch.metrics
    metrics |= mixtures.metrics(settings, batch.examples, batch.drawn.rewards)
    metrics |= difficulty.metrics(state, prompts, examples)

    if diagnosed:  # of the prompts as they came
      placed = mesh_lib.place(rewards.rewards, mesh, "batch", "group")
      diagnosis = diagnose(
        state.params, rollout, placed, diagnosis_key(state), state.score_norms
      )
      policy_lib.wait(diagnosis, check_signals)
      metrics |= mesh_lib.fetch(diagnosis)
      timer("diagnosis")
      check_signals(together=True)

    update_batch, of_batch = make_batch(
      state, batch, prompts, ref_params if following is None else following
    )
    policy_lib.wait(update_batch, check_signals)
    timer("reference")

    rows_due = sample_rows.is_due(settings, int(mesh_lib.fetch(state.step)) + 1)
    if state.difficulty is not None:
      right = rewards_lib.correctness(reward_pool, rewards, examples)
      state = update_success_rates(state, examples, right)
    state, of_update = programs.update(state, update_batch)
    # While the devices are at the update.
    rows = (
      sample_rows.of_batch(settings, policy, batch, update_batch)
      if rows_due
      else []
    )
    metrics["reward_counts"] = sample_rows.reward_counts(batch.drawn.rewards)
    if advance_stream is not None:
      state = advance_stream(state, batch.more_prompts)
    metrics = mesh_lib.fetch(of_batch | of_update) | metrics
    timer("update")
    metrics |= {f"seconds_{name}": s for name, s in timer.seconds.items()}
    state = state.replace(reference=following)
    return StepResult(state, metrics, rows, groups.all_failures(batch.drawn))

  return step
