"""Training step with rewards on the host: its parts, in their order.

    sample -> reward -> (resample groups) -> (diagnose) -> make batch -> update

Each part is a program that is compiled when it is first used. Only the update
touches the state, so that a step which a signal ends before it leaves no trace.
"""

import functools
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
from grpojax.rewards.groups import GroupRewards
from grpojax.training import policy as policy_lib
from grpojax.training.data import mixtures
from grpojax.training.policy import Policy
from grpojax.training.report import sample_rows
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import difficulty, reference, resampling
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step.batch import (
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


class HostStep(NamedTuple):
  """Parts of a step, each made once for a group size.

  Attributes:
    settings: Settings of the run.
    policy: Model.
    mesh: Mesh of training.
    reward_pool: Functions and model that compute rewards.
    check_signals: Function that is called between the parts; may raise.
    ref_params: Reference policy that is fixed, or None.
    programs: Compiled parts.
    sample_and_reward: `(params, prompts, examples, key, timer, first_prompt) ->
      (rollout, rewards)`, in `sampling.parts`.
    first_prompt: Number of the first prompt, where groups are replaced: a later
      draw is by the same program then; else None.
    resample_groups: Replacement of groups that do not vary; None without it.
    advance_stream: `(state, prompts) -> state`, likewise.
    diagnose: `(params, rollout, rewards, key, score_norms) -> metrics`.
    update_success_rates: `(state, examples, correctness) -> state`.
  """

  settings: TrainSettings
  policy: Policy
  mesh: jax.sharding.Mesh
  reward_pool: RewardPool
  check_signals: Callable[..., None]
  ref_params: Params | None
  programs: Programs
  sample_and_reward: Callable[..., tuple[Rollout, GroupRewards]]
  first_prompt: np.int32 | None
  resample_groups: Callable[..., resampling.ResampledBatch] | None
  advance_stream: Callable[[TrainState, int], TrainState] | None
  diagnose: Callable[..., dict[str, Array]]
  update_success_rates: Callable[..., TrainState]


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
      (`together` with all processes, see `interrupts.sigterm_requests`) and all
      through them, but for the last, the update; may raise.
    budgets: Prompts -> [B, G], tokens that each sample may spend, or None.

  Returns:
    `(state, prompts, examples, diagnosed, take) -> StepResult`, see `run_step`.
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

  sample_step = sample_and_reward(settings.sampling.parts)
  filtering, resample_groups = settings.filter_groups, None
  if filtering.enable:
    # A later draw is by the same program, where its prompts are as many.
    sample_draw = (
      sample_step if filtering.gen_parts == 1 else sample_and_reward(1)
    )
    resample_groups = resampling.make_resample_groups(
      settings, sample_draw, mesh, reward_pool, check_signals
    )
  diagnose = make_diagnose(
    settings, mesh_lib.row_shards(mesh), policy.vmappable
  )
  parts = HostStep(
    settings=settings,
    policy=policy,
    mesh=mesh,
    reward_pool=reward_pool,
    check_signals=check_signals,
    ref_params=ref_params,
    programs=programs,
    sample_and_reward=sample_step,
    first_prompt=np.int32(0) if filtering.enable else None,
    resample_groups=resample_groups,
    advance_stream=resampling.make_advance_stream(shardings)
    if filtering.enable
    else None,
    diagnose=policy_lib.jit(policy, diagnose),
    update_success_rates=difficulty.make_update_success_rates(
      settings, shardings
    ),
  )
  return functools.partial(run_step, parts)


def run_step(
  parts: HostStep,
  state: TrainState,
  prompts: Prompts,
  examples: list[dict[str, Any]],
  diagnosed: bool = False,
  take: resampling.Take | None = None,
) -> StepResult:
  """Samples, rewards and updates, once.

  Args:
    parts: Parts of the step.
    state: State before it; donated.
    prompts: Prompts of the step.
    examples: Examples of these prompts.
    diagnosed: True adds the metrics of `make_diagnose`, of the policy that
      sampled and of the prompts as they came.
    take: Function that gives more prompts to dynamic sampling.
  """
  timer, settings = Timer(), parts.settings
  # A reference that follows the policy is not an argument of the update.
  following, state = state.reference, state.replace(reference=None)
  reference_params = parts.ref_params if following is None else following
  key = jax.random.fold_in(state.key, state.step)

  rollout, rewards = parts.sample_and_reward(
    state.params, prompts, examples, key, timer, parts.first_prompt
  )
  parts.check_signals(together=True)
  batch = resampling.as_drawn(rollout, rewards, examples)
  if parts.resample_groups is not None:
    batch = parts.resample_groups(state.params, batch, key, timer, take)
  metrics = rewards_lib.metrics(batch.drawn) | batch.metrics
  metrics |= mixtures.metrics(settings, batch.examples, batch.drawn.rewards)
  if state.difficulty is not None:
    metrics |= difficulty.metrics(state, prompts, examples)

  if diagnosed:  # of the prompts as they came
    metrics |= _diagnose(parts, state, rollout, rewards)
    timer("diagnosis")
    parts.check_signals(together=True)

  update_batch, of_batch = _make_batch(
    parts, state, batch, prompts, reference_params
  )
  policy_lib.wait(update_batch, parts.check_signals)
  timer("reference")

  # From here on the state changes; the host's work is done while the devices
  # are at the update.
  number = int(mesh_lib.fetch(state.step)) + 1
  if state.difficulty is not None:
    right = rewards_lib.correctness(parts.reward_pool, rewards, examples)
    state = parts.update_success_rates(state, examples, right)
  state, of_update = parts.programs.update(state, update_batch)
  rows = []
  if sample_rows.is_due(settings, number):
    rows = sample_rows.of_batch(settings, parts.policy, batch, update_batch)
  metrics["reward_counts"] = sample_rows.reward_counts(batch.drawn.rewards)
  if parts.advance_stream is not None:
    state = parts.advance_stream(state, batch.more_prompts)
  metrics = mesh_lib.fetch(of_batch | of_update) | metrics
  timer("update")

  metrics |= {f"seconds_{name}": s for name, s in timer.seconds.items()}
  state = state.replace(reference=following)
  return StepResult(state, metrics, rows, groups.all_failures(batch.drawn))


def _diagnose(
  parts: HostStep, state: TrainState, rollout: Rollout, rewards: GroupRewards
) -> dict[str, Any]:
  """Metrics of a diagnosis, on the host."""
  placed = mesh_lib.place(rewards.rewards, parts.mesh, "batch", "group")
  metrics = parts.diagnose(
    state.params, rollout, placed, diagnosis_key(state), state.score_norms
  )
  policy_lib.wait(metrics, parts.check_signals)
  return mesh_lib.fetch(metrics)


def _make_batch(
  parts: HostStep,
  state: TrainState,
  batch: resampling.ResampledBatch,
  prompts: Prompts,
  reference_params: Params | None,
) -> tuple[Batch, dict[str, Array]]:
  """The batch of the update, and metrics of its completions."""
  settings, mesh, rewards = parts.settings, parts.mesh, batch.rewards
  placed, values = rewards_lib.place_rewards(settings, rewards, mesh)
  if reference_params is not None:
    reference_params = reference.to_device(reference_params)
  return parts.programs.make_batch(
    state.params,
    batch.rollout,
    placed,
    ref_params=reference_params,
    packing=plan_packing(settings, batch.rollout, rewards.rewards, mesh),
    score_norms=state.score_norms,
    values=values,
    scale=mesh_lib.place(batch.scale, mesh),
    prompt_weights=prompts.weights,
  )
