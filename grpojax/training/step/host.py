"""Training step with rewards on the host.

    sample -> reward -> (resample groups) -> (diagnose) -> make batch -> update

The parts on the devices are programs, compiled at their first use. Only the
update changes the state, so a signal before it leaves the state as it was.

With sampling.ahead = 1 a step also samples the next step's completions from the
same parameters, and computes their rewards during the update:

    devices   sample s+1 | update s           | sample s+2 ...
    host                 | text, rewards s+1  |
"""

import functools
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, PyTree

from grpojax.core import meshes
from grpojax.core.step import diagnosis_key
from grpojax.core.types import Batch, Params, Prompts, Rollout, TrainState
from grpojax.core.update import make_update
from grpojax.environments.episodes import play_together
from grpojax.rewards import groups
from grpojax.rewards.groups import GroupRewards
from grpojax.rewards.pool import abandon
from grpojax.training import policies
from grpojax.training.settings import mixtures
from grpojax.training.settings.batches import own_sampling_mesh
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import (
  difficulty,
  episodes,
  reference,
  resampling,
  sample_rows,
  sampling,
  scoring,
)
from grpojax.training.step.batch import make_batch_program, plan_packing
from grpojax.training.step.diagnosis import make_diagnose
from grpojax.training.step.pending import Pending, make_pending


class Timer:
  """Stopwatch that sums the time of named intervals in `seconds`."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def __call__(self, name: str) -> None:
    """Adds the time since the last call, or the start, to `seconds[name]`."""
    now = time.perf_counter()
    self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
    self._last = now


class Programs(NamedTuple):
  """Compiled parts of a step, with their signatures."""

  # `(params, prompts, key) -> Rollout`, on the sampling mesh
  sample: Callable[..., Rollout]
  # `(params, rollout, rewards, **options) -> (batch, metrics)`
  make_batch: Callable[..., tuple[Batch, dict[str, Array]]]
  # `(state, batch, ref_params) -> (state, metrics)`; the state is donated, and
  # only an exact KL term needs `ref_params`
  update: Callable[..., tuple[TrainState, dict[str, Array]]]


class StepResult(NamedTuple):
  """The new state after a step, and the step's records."""

  state: TrainState
  metrics: dict[str, Any]  # scalars, and `sample_rows.reward_counts`
  sample_rows: list[dict[str, Any]]  # for samples.jsonl; empty if not due
  failures: list[Any]  # failed rewards
  pending: Pending | None = None  # the next step's rollout, if drawn ahead


def make_programs(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Programs:
  """Returns the programs of a step; see `HostStep` for the arguments."""
  distribution = settings.sampling.distribution
  ref_lm = policy.teacher and policy.teacher.lm

  def update(lm, state, batch, ref_params=None):
    options = settings.optim.update
    run = make_update(lm, tx, settings.loss, options, distribution, ref_lm)
    return run(state, batch, ref_params)

  replay = settings.loss.router_replay
  return Programs(
    sampling.sampler_program(
      settings, policy, group_size, distribution, budgets, record_experts=replay
    ),
    policies.jit(policy, make_batch_program(settings, ref_lm)),
    policies.jit(
      policy, update, donate_argnums=1, out_shardings=(shardings, None)
    ),
  )


def make_sample_and_reward(
  policy: policies.Policy,
  sampler: sampling.Sampler,
  mesh: jax.sharding.Mesh,
  reward_pool: scoring.RewardPool,
  check_signals: Callable[[], None],
  player: Callable[..., Any] | None,
  parts: int,
  move: Callable[[Params], Params] = lambda params: params,
):
  """Returns a function that samples and rewards a batch in equal parts.

  All parts are dispatched at once; each is rewarded while the devices decode
  the next. With a `player` of `episodes.make_player`, the environments of one
  part answer while the devices decode another part. `move` copies the
  parameters to the sampling devices.

  The function returns a generator for `play_together`. The generator first
  yields the arrays being computed, and returns `(rollout, rewards)`.
  `first_prompt` is the index of the first prompt among all drawn with `key`.
  """
  submit = functools.partial(scoring.submit_rollout, policy, reward_pool)
  split = jax.jit(functools.partial(sampling.split_prompts, parts=parts))
  join = jax.jit(sampling.join_rollouts)

  def sample_and_reward(
    params: Params,
    prompts: Prompts,
    examples,
    key,
    timer: Timer,
    first_prompt=None,
    check: Callable[[], None] = check_signals,
  ) -> Generator[Any, None, tuple[Rollout, GroupRewards]]:
    # Split the batch into parts, with the indices of their first prompts.
    first = [] if first_prompt is None else [meshes.place(first_prompt, mesh)]
    batches = [(prompts, *first)] if parts == 1 else split(prompts, *first)
    rows = len(examples) // parts
    part_examples = [examples[i * rows :][:rows] for i in range(parts)]
    params = move(params)
    # Dispatch the sampling of all parts without waiting for it.
    if player is None:
      sampled = [
        episodes.sampled(sampler(params, part, key, *number))
        for part, *number in batches
      ]
      yield [part.rollout for part in sampled]
    else:
      playing = [
        player(params, part, part_examples[i], key, *n, check_signals=check)
        for i, (part, *n) in enumerate(batches)
      ]
      # `next` starts the decoding, and `play_together` continues it.
      yield [next(play) for play in playing]
      sampled = play_together(*playing)
    # Submit a part's texts to the reward workers as soon as it is sampled.
    submitted = []
    try:
      for i, part in enumerate(sampled):
        policies.wait(part.rollout, check)
        if i == parts - 1:
          timer("rollout")
        submitted.append(submit(part_examples[i], part))
    except BaseException:
      abandon([part.pending for part in submitted])
      raise
    # Wait for the rewards, and join the parts.
    _, rewards = scoring.collect_rewards(
      reward_pool, examples, submitted, check
    )
    timer("rewards")
    if player is not None:
      before = timer.seconds.get("environment", 0.0)  # from earlier draws
      seconds = sum(part.seconds for part in sampled)
      timer.seconds["environment"] = before + seconds
    rollouts = [part.rollout for part in sampled]
    return rollouts[0] if parts == 1 else join(rollouts), rewards

  return sample_and_reward


def _run_whole(sample_and_reward, *args) -> tuple[Rollout, GroupRewards]:
  return play_together(sample_and_reward(*args))[0]


class HostStep:
  """Training step with rewards on the host: `step(...) -> StepResult`.

  `ref_params` is a fixed reference, or None; `shardings` belong to the state.
  `check_signals` may raise. It is called repeatedly until the update, and with
  `together=True` in all processes between the parts of the step.
  `budgets(prompts)` [B, G], if any, limits the tokens of each sample.
  """

  def __init__(
    self,
    settings: TrainSettings,
    policy: policies.Policy,
    group_size: int,
    tx: optax.GradientTransformation,
    ref_params: Params | None,
    shardings: TrainState,
    reward_pool: scoring.RewardPool,
    check_signals: Callable[..., None],
    budgets: Callable[[Prompts], Array] | None = None,
  ):
    self.settings = settings
    self.policy = policy
    self.mesh = mesh = meshes.mesh_of(shardings)
    self.reward_pool = reward_pool
    self.check_signals = check_signals
    self.ref_params = ref_params
    # Programs of the step, each compiled at its first use.
    self.copy_params = reference.make_copy(shardings.params)
    self.programs = make_programs(
      settings, policy, group_size, tx, shardings, budgets
    )
    sampling_mesh = own_sampling_mesh(settings, mesh)
    # Separate sampling devices need copies of the parameters.
    move = lambda params: params
    if settings.mesh.sampling_devices:
      dtype = settings.model.dtype
      move = sampling.moved_params(policy, dtype, sampling_mesh)
    self.read_prompts = reference.make_read_prompts(settings, policy, mesh)
    player = None
    if reward_pool.environment is not None:
      player = episodes.make_player(
        settings,
        policy,
        group_size,
        settings.sampling.distribution,
        reward_pool.environment,
        mesh,
        record_experts=settings.loss.router_replay,
      )
    sample_and_reward = functools.partial(
      make_sample_and_reward,
      policy,
      sampling.on_sampling_mesh(self.programs.sample, mesh, sampling_mesh),
      mesh,
      reward_pool,
      check_signals,
      player,
      move=move,
    )
    self.sample_and_reward = sample_and_reward(settings.sampling.parts)
    self.first_prompt = self.resample_groups = None
    if settings.filter_groups.enable:
      # With this argument all draws of the same size use the same program.
      self.first_prompt = np.int32(0)
      sample_draw = self.sample_and_reward
      if settings.filter_groups.gen_parts > 1:
        sample_draw = sample_and_reward(1)
      draw = functools.partial(_run_whole, sample_draw)
      self.resample_groups = resampling.make_resample_groups(
        settings, draw, mesh, reward_pool, check_signals
      )
    self.advance_stream = resampling.make_advance_stream(shardings)
    shards = meshes.row_shards(mesh)
    diagnose = make_diagnose(settings, shards, policy.vmappable)
    self.diagnose = policies.jit(policy, diagnose)
    update_success_rates = difficulty.make_update_success_rates
    self.update_success_rates = update_success_rates(settings, shardings)

  def __call__(
    self,
    state: TrainState,
    prompts: Prompts,
    examples: list[dict[str, Any]],
    diagnosed: bool = False,
    take: resampling.Take | None = None,
    pending: Pending | None = None,
    upcoming: tuple[Prompts, list[dict[str, Any]]] | None = None,
  ) -> StepResult:
    """Performs one step; the state is donated.

    `pending` is the rollout of these prompts, if drawn ahead; `upcoming` are
    the prompts and examples of the next step, if this step samples them. `take`
    returns prompts that replace groups. `diagnosed` adds the metrics of
    `make_diagnose`, for the first samples of this step or of `upcoming`.
    """
    timer = Timer()
    settings = self.settings
    updating = threading.Event()
    # The update donates the state, so a moving reference is passed separately.
    moving = state.reference
    state = state.replace(reference=None)
    reference_params = self.ref_params if moving is None else moving
    key = jax.random.fold_in(state.key, state.step)

    # Sample and reward, or continue from the rollout drawn ahead.
    if pending is None:
      args = state.params, prompts, examples, key, timer, self.first_prompt
      rollout, rewards = _run_whole(self.sample_and_reward, *args)
    else:
      rollout, rewards, prompts_read = pending
      for example, read in zip(examples, prompts_read, strict=True):
        example |= read
    # Start to sample the next step from the same parameters.
    started = finish = None
    if upcoming:
      check = lambda: updating.is_set() or self.check_signals()
      started, finish = self._draw_ahead(state, upcoming, timer, check)
    self.check_signals(together=True)
    # Replace zero-variance groups, if filter_groups is on.
    batch = resampling.ResampledBatch(
      rollout, rewards, rewards, examples, np.arange(len(examples))
    )
    if self.resample_groups is not None:
      batch = self.resample_groups(state.params, batch, key, timer, take)
    metrics = {**batch.metrics, **scoring.metrics(batch.drawn)}
    metrics |= mixtures.metrics(settings, batch.examples, batch.drawn.rewards)
    if state.difficulty is not None:
      metrics |= difficulty.metrics(state, prompts, examples)

    if diagnosed:
      # With sampling.ahead only the next step's samples are on-policy.
      samples = finish()[:2] if finish else (rollout, rewards)
      metrics |= self._diagnose(state, *samples)
      timer("diagnosis")
      self.check_signals(together=True)

    # Compute the advantages and log-probabilities of the batch.
    update_batch, batch_metrics = self._make_batch(
      state, batch, prompts, reference_params
    )
    if finish and not diagnosed and not settings.mesh.sampling_devices:
      # Shared devices finish the next step's samples before they run the batch.
      policies.wait(started, self.check_signals)
      timer("rollout")
    policies.wait(update_batch, self.check_signals)
    timer("reference")

    # The state changes from here on, so signals are no longer checked.
    updating.set()
    number = int(meshes.fetch(state.step)) + 1
    if state.difficulty is not None:
      right = scoring.correctness(self.reward_pool, rewards, examples)
      state = self.update_success_rates(state, examples, right)
    # Only an exact KL term runs the reference model in the update.
    exact_reference = reference_params if settings.loss.has_exact_kl else None
    state, update_metrics = self.programs.update(
      state, update_batch, exact_reference
    )
    # Compute the next step's rewards while the devices update.
    pending = finish() if finish else None
    rows = []
    due = number % settings.log.samples_every == 0
    if due and settings.log.sample_groups > 0:
      rows = sample_rows.of_batch(settings, self.policy, batch, update_batch)
    metrics["reward_counts"] = sample_rows.reward_counts(batch.drawn.rewards)
    state = self.advance_stream(state, batch.more_prompts)
    metrics = meshes.fetch(batch_metrics | update_metrics) | metrics
    timer("update")

    metrics |= {f"seconds_{name}": s for name, s in timer.seconds.items()}
    state = state.replace(reference=moving)
    failures = groups.all_failures(batch.drawn)
    return StepResult(state, metrics, rows, failures, pending)

  def _draw_ahead(
    self, state: TrainState, upcoming, timer: Timer, check: Callable[[], Any]
  ) -> tuple[PyTree, Callable[[], Pending]]:
    """Starts sampling the next step; returns its arrays and `finish()`."""
    key = jax.random.fold_in(state.key, state.step + 1)
    params = state.params
    if self.reward_pool.environment is not None:
      # The update donates the parameters, but later turns still need them.
      params = self.copy_params(params)
    drawing = self.sample_and_reward(
      params, *upcoming, key, timer, self.first_prompt, check
    )
    started = next(drawing)

    @functools.cache
    def finish() -> Pending:
      return make_pending(*play_together(drawing)[0], upcoming[1])

    return started, finish

  def _diagnose(
    self, state: TrainState, rollout: Rollout, rewards: GroupRewards
  ) -> dict[str, Any]:
    values = rewards.rewards
    unknown = {}
    if values.dtype != np.float32:
      # float32 would lose differences, so subtract the mean of all prompts; the
      # diagnosis compares prompts, so they must have the same offset.
      values = (values - np.nanmean(values)).astype(np.float32)
      # `vanilla` has no baseline, so its error depends on the offset.
      unknown = {"gradient_mse_vanilla": np.nan}
    placed = meshes.place(values, self.mesh, "batch", "group")
    metrics = self.diagnose(state.params, rollout, placed, diagnosis_key(state))
    policies.wait(metrics, self.check_signals)
    return meshes.fetch(metrics) | unknown

  def _make_batch(
    self,
    state: TrainState,
    batch: resampling.ResampledBatch,
    prompts: Prompts,
    reference_params: Params | None,
  ) -> tuple[Batch, dict[str, Array]]:
    """Returns the batch of the update, and metrics of its completions."""
    settings = self.settings
    mesh = self.mesh
    rewards = batch.rewards
    placed, values = scoring.place_rewards(settings, rewards, mesh)
    ref_prompts = None
    if self.read_prompts:
      examples = [batch.examples[i] for i in batch.drawn_groups]
      ref_prompts = self.read_prompts(examples)
    return self.programs.make_batch(
      state.params,
      batch.rollout,
      placed,
      ref_params=reference.to_device(reference_params),
      ref_prompts=ref_prompts,
      packing=plan_packing(settings, batch.rollout, rewards.rewards, mesh),
      values=values,
      scale=meshes.place(batch.scale, mesh),
      prompt_weights=prompts.weights,
    )
