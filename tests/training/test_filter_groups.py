"""Groups that do not vary make room for fresh prompts; nothing else changes."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.rollout import rollout_metrics
from grpojax.core.types import Prompts
from grpojax.rewards import groups
from grpojax.runtime import compilation
from grpojax.training import policy as policy_lib
from grpojax.training.settings.batches import draw_parts
from grpojax.training.step import host, resampling
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib

B, G, T, VOCAB = 4, 4, 3, 5
REWARD = f"{pathlib.Path(__file__)}:three"


def three(prompt, completion, example):
  return float("3" in completion)


def other(prompt, completion, example):
  return float(len(completion))


def kinds_of(numbers):
  """Every third prompt of the stream is of the kind that can vary."""
  return np.where(np.array(numbers) % 3 == 1, 1 + np.array(numbers) % 2, 0)


def batch_of(first, count):
  """Prompts of these numbers in the stream, and their examples."""
  numbers = range(first, first + count)
  ids = kinds_of(numbers)[:, None].astype(np.int32)
  examples = [{"prompt_text": str(i), "answer": "1"} for i in numbers]
  return Prompts(ids, np.ones(ids.shape, bool)), examples


class Job:
  """Steps of a chain of three kinds; the first always says the same."""

  def __init__(self, tabular, words, open_step, settings, reward_pool):
    self.lm = tabular.lm(3, VOCAB)
    table = self.lm.init(jax.random.key(0)).at[..., 3].add(-1.0)
    self.table = table.at[0, 0, 0].set(50.0)
    self.policy = policy_lib.Policy(pathlib.Path(), self.lm, words, (0,), 0)
    self.settings, self.taken = settings, 0
    self.mesh, self.state, self.step = open_step(
      settings, self.policy, self.table, optax.sgd(0.1), reward_pool
    )

  def take(self, count=None):
    count = count or B // draw_parts(self.settings)
    prompts, examples = batch_of(self.taken, count)
    self.taken += count
    return mesh_lib.place(prompts, self.mesh, "batch"), examples

  def run(self, diagnosed=False):
    with jax.set_mesh(self.mesh):
      prompts, examples = self.take(B)
      done = self.step(self.state, prompts, examples, diagnosed, self.take)
    self.state = done.state
    return done.metrics


def settings_of(settings_with, **changes):
  settings = {
    "batch_size": B,
    "group_size": G,
    "sampling__max_new_tokens": T,
    "optim__micro_batches": 1,
    "loss__weighting": "fixed_length",
    "reward__functions": (REWARD,),
    "filter_groups__enable": True,
  }
  return settings_with(**settings | changes)


@pytest.fixture
def job(tabular, settings_with, open_step, words):
  """`(**changes) -> Job`."""
  with pytest.MonkeyPatch.context() as patch:
    made = []

    def make(**changes):
      settings = settings_of(settings_with, **changes)
      reward_pool = rewards_lib.open_reward_pool(settings)
      made.append(reward_pool)
      job = Job(tabular, words, open_step, settings, reward_pool.__enter__())
      job.compared = []
      pack = host.plan_packing

      def spy(settings, samples, rewards, mesh):
        job.compared.append((jax.device_get(samples), rewards))
        return pack(settings, samples, rewards, mesh)

      patch.setattr(host, "plan_packing", spy)
      return job

    yield make
    for reward_pool in made:
      reward_pool.__exit__(None, None, None)


def whole_rollout(job, count):
  """All that can be drawn for the first step, by one program, and rewards."""
  program = sampling_lib.sampler_program(
    job.settings, job.policy, G, job.settings.sampling.distribution
  )
  prompts, _ = batch_of(0, count)
  key = jax.random.fold_in(jax.random.key(job.settings.seed), 0)
  samples = jax.device_get(program(job.table, prompts, key))
  three = (samples.completion_ids == 3) & samples.completion_mask
  return samples, np.any(three, -1).astype(np.float32)


@pytest.mark.slow
def test_groups_are_replaced_by_those_of_the_next_prompts(job, monkeypatch):
  parts, of_data_sets = 2, []

  def spy(settings, examples, rewards):
    of_data_sets.append((examples, rewards))
    return {}

  monkeypatch.setattr(host.mixtures, "metrics", spy)
  run = job(filter_groups__gen_parts=parts)
  whole, rewards = whole_rollout(run, 10 * B)
  varied = np.ptp(rewards, -1) > 0
  good, size = np.flatnonzero(varied), B // parts
  assert 2 * B < good[B - 1] and varied[:B].sum() == 1
  row = run.run()
  drawn = -(-(good[B - 1] + 1 - B) // size) * size + B
  # The first batch's own group stays in its place.
  expected, own = list(good[1:B]), good[0]
  expected.insert(own, own)
  ((samples, found),) = run.compared
  np.testing.assert_array_equal(found, rewards[expected])
  for name, value in vars(samples).items():
    if value is None:  # turns, which there are none of
      continue
    np.testing.assert_array_equal(value, getattr(whole, name)[expected], name)
  assert run.taken == drawn == int(run.state.prompts_consumed)
  assert row["gen_batches"] == drawn / B and row["groups_kept"] == 1
  accepted = (B - 1) / good[B - 1]  # of good[B - 1] + 1 prompts
  assert row["group_acceptance"] == pytest.approx(accepted)
  # Metrics are of all that was drawn.
  ((examples, by_example),) = of_data_sets
  assert [e["prompt_text"] for e in examples] == list(map(str, range(drawn)))
  np.testing.assert_array_equal(by_example, rewards[:drawn])
  of_all = jax.tree.map(lambda x: jnp.asarray(x[:drawn]), whole)
  of_all = jax.jit(rollout_metrics)(of_all, rewards[:drawn])
  for name, value in of_all.items():
    np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_batch_that_varies_is_left_alone(job):
  """Bit for bit the step without dynamic sampling."""
  of_length = f"{pathlib.Path(__file__)}:other"
  changes = {"reward__functions": (of_length,)}

  def never():
    raise AssertionError("nothing else is asked for")

  def stepped(**more):
    run = job(**changes | more)
    given = batch_of(1, 1)
    prompts, examples = (
      jax.tree.map(lambda x: np.concatenate([x] * B), given[0]),
      given[1] * B,
    )
    with jax.set_mesh(run.mesh):
      prompts = mesh_lib.place(prompts, run.mesh, "batch")
      state, row, *_ = run.step(run.state, prompts, examples, False, never)
    return jax.device_get(state), row

  on, row = stepped(filter_groups__rescale=True)
  off, plain = stepped(filter_groups__enable=False)
  jax.tree.map(np.testing.assert_array_equal, on.params, off.params)
  assert on.prompts_consumed == off.prompts_consumed == B
  for name in set(plain) - {"tokens_per_second"}:
    if not name.startswith("seconds"):
      np.testing.assert_allclose(row[name], plain[name], 1e-6, err_msg=name)
  assert set(row) - set(plain) == {
    "gen_batches",
    "group_acceptance",
    "groups_kept",
  }


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_leaves_room(job, limit):
  """What does not vary then has no reward; the mean is of those that do."""
  run = job(filter_groups__max_num_gen_batches=limit)
  row = run.run()
  whole, rewards = whole_rollout(run, limit * B)
  good = np.flatnonzero(np.ptp(rewards, -1) > 0)
  assert 0 < len(good) < B
  ((_, found),) = run.compared
  np.testing.assert_array_equal(np.isfinite(found).all(-1).sum(), len(good))
  kept = found[np.isfinite(found).all(-1)]
  np.testing.assert_array_equal(np.sort(kept, 0), np.sort(rewards[good], 0))
  assert row["groups_kept"] == len(good) / B and row["gen_batches"] == limit
  assert row["group_acceptance"] == len(good) / (limit * B)
  assert run.taken == limit * B == int(run.state.prompts_consumed)
  # No group of any step differs: a step of nothing, which says so.
  run.taken, table = 0, run.table.at[1:].set(run.table[0])
  run.state = run.state.replace(params=table)
  row = run.run()
  assert row["groups_kept"] == row["group_acceptance"] == 0
  assert row["zero_variance_groups"] == 1 and row["grad_norm"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["leave_one_out", "batch_std"])
def test_leaving_out_alone_changes_nothing(job, advantage):
  """One batch, rescaled: the mean of those that vary, times their share."""
  learned = []
  for changes in (
    {"filter_groups__max_num_gen_batches": 1, "filter_groups__rescale": True},
    {"filter_groups__enable": False},
  ):
    run = job(advantage=advantage, **changes)
    row = run.run()
    assert row["zero_variance_groups"] == 0.75
    learned.append(jax.device_get(run.state.params) - run.table)
  assert np.abs(learned[1]).max() > 1e-3
  np.testing.assert_allclose(learned[0], learned[1], atol=1e-7)


@pytest.mark.slow
def test_the_diagnosis_is_of_the_prompts_as_they_came(job):
  changes = {"diagnostics__share": 1.0}
  on = job(**changes).run(diagnosed=True)
  off = job(filter_groups__enable=False, **changes).run(diagnosed=True)
  for name in ("c1", "c2", "c3", "optimal_group_size"):
    np.testing.assert_array_equal(on[name], off[name], name)
  assert on["gen_batches"] > 1


@pytest.mark.slow
def test_nothing_compiles_after_the_first_draws(job):
  run = job(filter_groups__max_num_gen_batches=30, optim__packing=False)
  batches = [run.run()["gen_batches"] for _ in range(2)]
  before = len(compilation.seconds())
  batches += [run.run()["gen_batches"] for _ in range(3)]
  assert len(set(batches)) > 1
  assert len(compilation.seconds()) == before


def test_which_reward_has_to_vary(settings_with, samples_of):
  """The first function's, or whatever is compared."""
  rewards = np.array([[1.0, 1], [1, 2], [3, 1], [np.nan, 1]], np.float32)
  values = {
    "a": np.array([[0.0, 1], [1, 1], [1, 0], [0, 1]], np.float32),
    "b": np.array([[1.0, 0], [0, 1], [2, 1], [0, 1]], np.float32),
  }
  scores = groups.GroupRewards(rewards, values, rewards < 0, [[], [], [], []])
  ends = np.array([[1, 1], [0, 1], [0, 0], [1, 1]], bool)
  samples = samples_of(np.ones((4, 2, 1)), ends)

  def found(right=values["a"], **changes):
    settings = settings_of(
      settings_with, reward__functions=("a", "b"), **changes
    )
    return resampling.varying_groups(settings, samples, scores, right).tolist()

  plain = {"reward__weights": (1.0, 1.0)}
  assert found(**plain) == [False, True, True, False]
  acc = found(filter_groups__metric="acc", **plain)
  assert acc == [True, False, True, False]
  judged = found(values["b"], filter_groups__metric="acc", **plain)
  assert judged == [True, True, True, False]  # as in a mixture
  each = {"reward__aggregation": "normalize_then_sum"}
  assert found(**each, **plain) == [True, True, True, False]
  # What only is logged does not make a group vary.
  of_first = found(**each, reward__weights=(1.0, 0.0))
  assert of_first == [True, False, True, False]
  # Nor does what was cut off, where it is in no baseline, or nowhere else.
  left = found(loss__truncated="drop", **plain)
  assert left == [False, False, False, False]
  left = found(loss__truncated="mask", **plain)
  assert left == [False, True, False, False]
