"""Training step with rewards on the host: its parts, in their order.

    sample -> reward -> (resample groups) -> (diagnose) -> make batch -> update

Each part is a program that is compiled when it is first used. Only the update
touches the state, so that a step which a signal ends before it leaves no trace.

With sampling.ahead = 1 the next step is sampled in this one, from the same
parameters, and rewarded while the devices are at the update:

    devices   sample s+1 | update s           | sample s+2 ...
    host                 | text, rewards s+1  |
"""

import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from grpojax.core import mesh as mesh_lib
from grpojax.core.step import diagnosis_key
from grpojax.core.types import Batch, Params, Prompts, Rollout, TrainState
from grpojax.core.update import make_update
from grpojax.environments.episodes import play_together
from grpojax.rewards import groups
from grpojax.rewards.groups import GroupRewards
from grpojax.rewards.pool import abandon
from grpojax.training import policy as policy_lib
from grpojax.training.data import mixtures
from grpojax.training.policy import Policy
from grpojax.training.report import sample_rows
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import difficulty, episodes, reference, resampling
from grpojax.training.step import pending as pending_lib
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step.batch import make_batch_program, plan_packing
from grpojax.training.step.diagnosis import make_diagnose
from grpojax.training.step.pending import Pending
from grpojax.training.step.rewards import RewardPool
from grpojax.training.step.sampling import (
  Sampler,
  join_rollouts,
  moved_params,
  on_sampling_mesh,
  sampler_program,
  split_prompts,
)
from grpojax.training.step.timer import Timer


class Programs(NamedTuple):
  """Compiled parts of a step.

  Attributes:
    sample: `(params, prompts, key) -> Rollout`, on the sampling mesh.
    make_batch: `(params, rollout, rewards, **options) -> (batch, metrics)`.
    update: `(state, batch, ref_params) -> (state, metrics)`; the state is
      donated, and the reference None but for an exact KL term.
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
    pending: Rollout of the next step, where it is drawn a step ahead.
  """

  state: TrainState
  metrics: dict[str, Any]
  sample_rows: list[dict[str, Any]]
  failures: list[Any]
  pending: Pending | None = None


def make_programs(
  settings: TrainSettings,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Programs:
  """Makes the programs of a step; arguments as of `HostStep`."""
  sampling = settings.sampling.distribution
  ref_lm = policy.teacher and policy.teacher.lm

  def update(lm, state, batch, ref_params=None):
    options = settings.optim.update
    run = make_update(lm, tx, settings.loss, options, sampling, ref_lm)
    return run(state, batch, ref_params)

  return Programs(
    sampler_program(
      settings,
      policy,
      group_size,
      sampling,
      budgets,
      record_experts=settings.loss.router_replay,
    ),
    policy_lib.jit(policy, make_batch_program(settings, ref_lm)),
    policy_lib.jit(
      policy, update, donate_argnums=1, out_shardings=(shardings, None)
    ),
  )


def make_sample_and_reward(
  policy: Policy,
  sampler: Sampler,
  mesh: jax.sharding.Mesh,
  reward_pool: RewardPool,
  check_signals: Callable[[], None],
  player: Callable[..., Any] | None,
  parts: int,
  move: Callable[[Params], Params] = lambda params: params,
):
  """Makes the sampling of prompts in equal parts, with rewards meanwhile.

  All parts are dispatched at once, and decoded one after another. What is done
  becomes text, and goes to the workers while the devices are at the next part.
  With a `player` of `episodes.make_player` the parts take turns: while the
  environments of one answer, the devices decode the other. `move` gives the
  parameters to the devices that sample.

  Returns:
    `(params, prompts, examples, key, timer, first_prompt=None) -> (rollout,
    rewards)`, which gives the timer "rollout" and "rewards", as a generator
    (`play_together`) that first yields arrays that the devices are at.
    `first_prompt` is the number of the first prompt among those that share the
    key, None for 0. `check` answers signals, `check_signals` by default.
  """
  split = jax.jit(functools.partial(split_prompts, parts=parts))
  join = jax.jit(join_rollouts)

  def sample_and_reward(
    params: Params,
    prompts: Prompts,
    examples,
    key,
    timer: Timer,
    first_prompt=None,
    check: Callable[[], None] = check_signals,
  ) -> Generator[Any, None, tuple[Rollout, GroupRewards]]:
    first = [] if first_prompt is None else [mesh_lib.place(first_prompt, mesh)]
    batches = [(prompts, *first)] if parts == 1 else split(prompts, *first)
    params, rows, submitted = move(params), len(examples) // parts, []
    of_parts = [examples[i * rows :][:rows] for i in range(parts)]
    if player is None:
      sampled = [
        episodes.sampled(sampler(params, part, key, *number))
        for part, *number in batches
      ]
      yield [one.rollout for one in sampled]
    else:
      playing = [
        player(params, part, own, key, *number, check_signals=check)
        for (part, *number), own in zip(batches, of_parts, strict=True)
      ]
      yield [next(one) for one in playing]
      sampled = play_together(*playing)
    try:
      for i, one in enumerate(sampled):
        policy_lib.wait(one.rollout, check)
        if i == parts - 1:
          timer("rollout")
        submitted.append(
          rewards_lib.submit_rollout(policy, reward_pool, of_parts[i], one)
        )
    except BaseException:
      abandon([part.pending for part in submitted])
      raise
    _, rewards = rewards_lib.collect_rewards(
      reward_pool, examples, submitted, check
    )
    timer("rewards")
    if player is not None:
      before = timer.seconds.get("environment", 0.0)  # of an earlier draw
      seconds = sum(one.seconds for one in sampled)
      timer.seconds["environment"] = before + seconds
    rollouts = [one.rollout for one in sampled]
    return rollouts[0] if parts == 1 else join(rollouts), rewards

  return sample_and_reward


def _whole(sample_and_reward, *args) -> tuple[Rollout, GroupRewards]:
  """Samples and rewards from start to end."""
  return play_together(sample_and_reward(*args))[0]


class HostStep:
  """Step whose rewards are computed on the host: `step(...) -> StepResult`.

  A class because it shares what is made once for a group size.

  Args:
    settings: Settings of the run.
    policy: Model; the state has the parameters.
    group_size: Completions a prompt, G.
    tx: Optimizer.
    ref_params: Reference policy that is fixed, or None.
    shardings: Shardings of the state, the same before and after each step.
    reward_pool: Functions and model that compute rewards.
    check_signals: Function that is called between the parts of a step
      (`together` with all processes) and all through them, but for the last,
      the update; may raise.
    budgets: Prompts -> [B, G], tokens that each sample may spend, or None.
  """

  def __init__(
    self,
    settings: TrainSettings,
    policy: Policy,
    group_size: int,
    tx: optax.GradientTransformation,
    ref_params: Params | None,
    shardings: TrainState,
    reward_pool: RewardPool,
    check_signals: Callable[..., None],
    budgets: Callable[[Prompts], Array] | None = None,
  ):
    self.settings, self.policy = settings, policy
    self.mesh = mesh = mesh_lib.mesh_of(shardings)
    self.reward_pool, self.check_signals = reward_pool, check_signals
    self.ref_params = ref_params
    self.copy_params = jax.jit(
      lambda params: jax.tree.map(jnp.copy, params),
      out_shardings=shardings.params,
    )
    self.programs = make_programs(
      settings, policy, group_size, tx, shardings, budgets
    )
    sampling_mesh = batches_lib.own_sampling_mesh(settings, mesh)
    sampler = on_sampling_mesh(self.programs.sample, mesh, sampling_mesh)
    move = lambda params: params
    if settings.mesh.sampling_devices:
      move = moved_params(policy, settings.model.dtype, sampling_mesh)
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
      sampler,
      mesh,
      reward_pool,
      check_signals,
      player,
      move=move,
    )
    self.sample_and_reward = sample_and_reward(settings.sampling.parts)
    self.first_prompt = self.resample_groups = None
    filtering = settings.filter_groups
    if filtering.enable:
      # A later draw is by the same program, where its prompts are as many.
      self.first_prompt = np.int32(0)
      sample_draw = self.sample_and_reward
      if filtering.gen_parts > 1:
        sample_draw = sample_and_reward(1)
      draw = functools.partial(_whole, sample_draw)
      self.resample_groups = resampling.make_resample_groups(
        settings, draw, mesh, reward_pool, check_signals
      )
    self.advance_stream = resampling.make_advance_stream(shardings)
    diagnose = make_diagnose(
      settings, mesh_lib.row_shards(mesh), policy.vmappable
    )
    self.diagnose = policy_lib.jit(policy, diagnose)
    self.update_success_rates = difficulty.make_update_success_rates(
      settings, shardings
    )

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
    """Samples, rewards and updates, once; the state is donated.

    `diagnosed` adds the metrics of `make_diagnose`, of the policy that sampled
    and of the prompts as they came; `take` gives more to dynamic sampling.
    `pending` is the rollout of these prompts, where one is drawn already;
    `upcoming` are the prompts of the next step, where they are sampled in this
    one. What is diagnosed is what these parameters sampled: the latter, then.
    """
    timer, settings, updating = Timer(), self.settings, threading.Event()
    # A reference that follows the policy is not an argument of the update.
    following, state = state.reference, state.replace(reference=None)
    reference_params = self.ref_params if following is None else following
    key = jax.random.fold_in(state.key, state.step)

    if pending is None:
      rollout, rewards = _whole(
        self.sample_and_reward,
        state.params,
        prompts,
        examples,
        key,
        timer,
        self.first_prompt,
      )
    else:
      rollout, rewards = pending_lib.with_texts(pending, examples)
    started = finish = None
    if upcoming:
      check = lambda: updating.is_set() or self.check_signals()
      started, finish = self._draw_ahead(state, upcoming, timer, check)
    self.check_signals(together=True)
    batch = resampling.as_drawn(rollout, rewards, examples)
    if self.resample_groups is not None:
      batch = self.resample_groups(state.params, batch, key, timer, take)
    metrics = {**batch.metrics, **rewards_lib.metrics(batch.drawn)}
    metrics |= mixtures.metrics(settings, batch.examples, batch.drawn.rewards)
    if state.difficulty is not None:
      metrics |= difficulty.metrics(state, prompts, examples)

    if diagnosed:  # of the prompts as they came
      own = finish()[:2] if finish else (rollout, rewards)
      metrics |= self._diagnose(state, *own)
      timer("diagnosis")
      self.check_signals(together=True)

    update_batch, of_batch = self._make_batch(
      state, batch, prompts, reference_params
    )
    if finish and not diagnosed and not settings.mesh.sampling_devices:
      # On the same devices the batch comes behind the next step's samples.
      policy_lib.wait(started, self.check_signals)
      timer("rollout")
    policy_lib.wait(update_batch, self.check_signals)
    timer("reference")

    # From here on the state changes; the host's work is done while the devices
    # are at the update.
    updating.set()
    number = int(mesh_lib.fetch(state.step)) + 1
    if state.difficulty is not None:
      right = rewards_lib.correctness(self.reward_pool, rewards, examples)
      state = self.update_success_rates(state, examples, right)
    exact = self.settings.loss.has_exact_kl
    of_reference = reference_params if exact else None
    state, of_update = self.programs.update(state, update_batch, of_reference)
    pending, rows = finish() if finish else None, []
    due = number % settings.log.samples_every == 0
    if due and settings.log.sample_groups > 0:
      rows = sample_rows.of_batch(settings, self.policy, batch, update_batch)
    metrics["reward_counts"] = sample_rows.reward_counts(batch.drawn.rewards)
    state = self.advance_stream(state, batch.more_prompts)
    metrics = mesh_lib.fetch(of_batch | of_update) | metrics
    timer("update")

    metrics |= {f"seconds_{name}": s for name, s in timer.seconds.items()}
    state = state.replace(reference=following)
    failures = groups.all_failures(batch.drawn)
    return StepResult(state, metrics, rows, failures, pending)

  def _draw_ahead(
    self, state: TrainState, upcoming, timer: Timer, check: Callable[[], Any]
  ) -> tuple[PyTree, Callable[[], Pending]]:
    """Asks the devices for the next step's samples.

    Returns arrays that they are at, and a function that waits for the samples
    and their rewards, the first time.
    """
    key, params = jax.random.fold_in(state.key, state.step + 1), state.params
    if self.reward_pool.environment is not None:
      # Its turns go on when the update has taken the parameters.
      params = self.copy_params(params)
    drawing = self.sample_and_reward(
      params, *upcoming, key, timer, self.first_prompt, check
    )
    started = next(drawing)

    @functools.cache
    def finish() -> Pending:
      return pending_lib.of_examples(*play_together(drawing)[0], upcoming[1])

    return started, finish

  def _diagnose(
    self, state: TrainState, rollout: Rollout, rewards: GroupRewards
  ) -> dict[str, Any]:
    """Metrics of a diagnosis, on the host."""
    own, unknown = rewards.rewards, {}
    if own.dtype != np.float32:  # one number less: this compares prompts
      own = (own - np.nanmean(own)).astype(np.float32)
      unknown = {"gradient_mse_vanilla": np.nan}
    placed = mesh_lib.place(own, self.mesh, "batch", "group")
    metrics = self.diagnose(state.params, rollout, placed, diagnosis_key(state))
    policy_lib.wait(metrics, self.check_signals)
    return mesh_lib.fetch(metrics) | unknown

  def _make_batch(
    self,
    state: TrainState,
    batch: resampling.ResampledBatch,
    prompts: Prompts,
    reference_params: Params | None,
  ) -> tuple[Batch, dict[str, Array]]:
    """The batch of the update, and metrics of its completions."""
    settings, mesh, rewards = self.settings, self.mesh, batch.rewards
    placed, values = rewards_lib.place_rewards(settings, rewards, mesh)
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
      scale=mesh_lib.place(batch.scale, mesh),
      prompt_weights=prompts.weights,
    )
