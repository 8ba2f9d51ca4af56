"""Dynamic sampling replaces zero-variance groups and changes nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import meshes
from grpojax.core.rollout import rollout_metrics
from grpojax.core.types import Prompts
from grpojax.rewards.pool import GroupRewards
from grpojax.runtime import compilation
from grpojax.training.settings.batches import draw_parts
from grpojax.training.step import host, sampling
from grpojax.training.step.extensions import dynamic_sampling

B = 4
G = 4
T = 3
VOCAB = 5
OFF = {"filter_groups__enable": False}


def three(prompt, completion, example):
  return float("3" in completion)


def other(prompt, completion, example):
  return float(len(completion))


def batch_of(first, count):
  """Returns prompts `first` to `first + count` of the stream, and examples.

  Every third prompt has kind 1 or 2, whose rewards can vary.
  """
  numbers = np.arange(first, first + count)
  kinds = np.where(numbers % 3 == 1, 1 + numbers % 2, 0)
  ids = kinds[:, None].astype(np.int32)
  examples = [{"prompt_text": str(i), "answer": "1"} for i in numbers]
  return Prompts(ids, np.ones(ids.shape, bool)), examples


class Job:
  """Steps of a chain of three kinds, of which kind 0 is deterministic."""

  def __init__(self, tabular, word_policy, open_step, settings):
    lm = tabular.lm(3, VOCAB)
    table = lm.init(jax.random.key(0)).at[..., 3].add(-1.0)
    self.table = table.at[0, 0, 0].set(50.0)
    self.policy = word_policy(lm)
    self.settings = settings
    self.taken = 0
    self.compared = []
    self.mesh, self.state, self.step = open_step(
      settings, self.policy, self.table, optax.sgd(0.1)
    )

  def take(self, count=None):
    count = count or B // draw_parts(self.settings)
    prompts, examples = batch_of(self.taken, count)
    self.taken += count
    return meshes.place(prompts, self.mesh, "batch"), examples

  def run(self):
    with jax.set_mesh(self.mesh):
      batch = self.take(B)
      done = host.take_step(self.step, self.state, *batch, self.take)
    self.state = done.state
    return done.metrics


@pytest.fixture
def job_settings(settings_with):
  settings = {
    "batch_size": B,
    "group_size": G,
    "sampling__max_new_tokens": T,
    "optim__micro_batches": 1,
    "loss__weighting": "fixed_length",
    "reward__functions": (f"{__file__}:three",),
    "filter_groups__enable": True,
  }
  return lambda **changes: settings_with(**settings | changes)


@pytest.fixture
def job(tabular, job_settings, open_step, word_policy, monkeypatch):
  """`(**changes) -> Job`."""

  def make(**changes):
    job = Job(tabular, word_policy, open_step, job_settings(**changes))
    pack = host.plan_packing

    def spy(settings, samples, rewards, mesh):
      job.compared.append((jax.device_get(samples), rewards))
      return pack(settings, samples, rewards, mesh)

    monkeypatch.setattr(host, "plan_packing", spy)
    return job

  return make


def whole_rollout(job, count):
  """Samples `count` prompts of the first step at once; returns rewards too."""
  program = sampling.sampler_program(
    job.settings, job.policy, G, job.settings.sampling.distribution
  )
  prompts, _ = batch_of(0, count)
  key = jax.random.fold_in(jax.random.key(job.settings.seed), 0)
  samples = jax.device_get(program(job.table, prompts, key))
  three = (samples.completion_ids == 3) & samples.completion_mask
  return samples, np.any(three, -1).astype(np.float32)


@pytest.mark.slow
def test_groups_are_replaced_by_groups_of_the_next_prompts(job, monkeypatch):
  parts = 2
  mixture_args = []

  def spy(settings, examples, rewards):
    mixture_args.append((examples, rewards))
    return {}

  monkeypatch.setattr(host.mixtures, "metrics", spy)
  run = job(filter_groups__gen_parts=parts)
  whole, rewards = whole_rollout(run, 10 * B)
  varied = np.ptp(rewards, -1) > 0
  good = np.flatnonzero(varied)
  size = B // parts
  assert 2 * B < good[B - 1] and varied[:B].sum() == 1
  row = run.run()
  drawn = -(-(good[B - 1] + 1 - B) // size) * size + B
  # The varying group of the first batch stays in its row.
  expected = list(good[1:B])
  expected.insert(good[0], good[0])
  ((samples, compared),) = run.compared
  np.testing.assert_array_equal(compared, rewards[expected])
  for name, value in vars(samples).items():
    if value is not None:
      of_groups = getattr(whole, name)[expected]
      np.testing.assert_array_equal(value, of_groups, name)
  assert run.taken == drawn == int(run.state.prompts_consumed)
  assert row["gen_batches"] == drawn / B and row["groups_kept"] == 1
  accepted = (B - 1) / good[B - 1]  # of good[B - 1] + 1 prompts
  assert row["group_acceptance"] == pytest.approx(accepted)
  # Metrics are over all drawn groups.
  ((examples, by_example),) = mixture_args
  assert [e["prompt_text"] for e in examples] == list(map(str, range(drawn)))
  np.testing.assert_array_equal(by_example, rewards[:drawn])
  everything = jax.tree.map(lambda x: jnp.asarray(x[:drawn]), whole)
  metrics = jax.jit(rollout_metrics)(everything, rewards[:drawn])
  for name, value in metrics.items():
    np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_batch_that_varies_equals_the_step_without_filter_groups(job):
  def never():
    raise AssertionError("no more prompts are needed")

  def stepped(**changes):
    run = job(reward__functions=(f"{__file__}:other",), **changes)
    prompt, examples = batch_of(1, 1)
    prompts = jax.tree.map(lambda x: np.concatenate([x] * B), prompt)
    with jax.set_mesh(run.mesh):
      prompts = meshes.place(prompts, run.mesh, "batch")
      args = run.state, prompts, examples * B, never
      state, row, *_ = host.take_step(run.step, *args)
    return jax.device_get(state), row

  on, row = stepped(filter_groups__rescale=True)
  off, plain = stepped(**OFF)
  jax.tree.map(np.testing.assert_array_equal, on.params, off.params)
  assert on.prompts_consumed == off.prompts_consumed == B
  for name in set(plain) - {"tokens_per_second"}:
    if not name.startswith("seconds"):
      np.testing.assert_allclose(row[name], plain[name], 1e-6, err_msg=name)
  added = {"gen_batches", "group_acceptance", "groups_kept"}
  assert set(row) - set(plain) == added


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2])
def test_zero_variance_groups_at_the_limit_have_no_reward(job, limit):
  run = job(filter_groups__max_num_gen_batches=limit)
  row = run.run()
  _, rewards = whole_rollout(run, limit * B)
  good = np.flatnonzero(np.ptp(rewards, -1) > 0)
  assert 0 < len(good) < B
  ((_, compared),) = run.compared
  varying = compared[np.isfinite(compared).all(-1)]
  np.testing.assert_array_equal(np.sort(varying, 0), np.sort(rewards[good], 0))
  assert row["groups_kept"] == len(good) / B and row["gen_batches"] == limit
  assert row["group_acceptance"] == len(good) / (limit * B)
  assert run.taken == limit * B == int(run.state.prompts_consumed)
  # A step without any varying group has no gradient.
  run.taken, table = 0, run.table.at[1:].set(run.table[0])
  run.state = run.state.replace(params=table)
  row = run.run()
  assert row["groups_kept"] == row["group_acceptance"] == 0
  assert row["zero_variance_groups"] == 1 and row["grad_norm"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["leave_one_out", "batch_std"])
def test_rescaling_undoes_the_filter_if_no_group_is_replaced(job, advantage):
  once = {"filter_groups__max_num_gen_batches": 1}
  updates = []
  for changes in (once | {"filter_groups__rescale": True}, OFF):
    run = job(advantage=advantage, **changes)
    assert run.run()["zero_variance_groups"] == 0.75
    updates.append(jax.device_get(run.state.params) - run.table)
  assert np.abs(updates[1]).max() > 1e-3
  np.testing.assert_allclose(updates[0], updates[1], atol=1e-7)


@pytest.mark.slow
def test_the_diagnosis_uses_groups_before_replacement(job):
  rows = []
  for changes in ({}, OFF):
    run = job(diagnostics__every=1, diagnostics__share=1.0, **changes)
    run.state = run.state.replace(step=run.state.step + 1)
    rows.append(run.run())
  on, off = rows
  for name in ("c1", "c2", "c3", "optimal_group_size"):
    np.testing.assert_array_equal(on[name], off[name], name)
  assert on["gen_batches"] > 1


@pytest.mark.slow
def test_later_draws_compile_no_programs(job):
  run = job(filter_groups__max_num_gen_batches=30, optim__packing=False)
  batches = [run.run()["gen_batches"] for _ in range(2)]
  before = len(compilation.seconds())
  batches += [run.run()["gen_batches"] for _ in range(3)]
  assert len(set(batches)) > 1
  assert len(compilation.seconds()) == before


A = np.array([[0.0, 1], [1, 1], [1, 0], [0, 1]], np.float32)
OTHER = np.array([[1.0, 0], [0, 1], [2, 1], [0, 1]], np.float32)
ACC = {"filter_groups__metric": "acc"}
EACH = {"reward__aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
  "right, changes, expected",
  [
    (A, {}, [0, 1, 1, 0]),
    (A, ACC, [1, 0, 1, 0]),
    (OTHER, ACC, [1, 1, 1, 0]),  # as in a mixture
    (A, EACH, [1, 1, 1, 0]),
    (A, EACH | {"reward__weights": (1.0, 0.0)}, [1, 0, 1, 0]),
    (A, {"loss__truncated": "drop"}, [0, 0, 0, 0]),
    (A, {"loss__truncated": "mask"}, [0, 1, 0, 0]),
  ],
)
def test_groups_vary_by_the_compared_rewards(
  right, changes, expected, job_settings, samples_of
):
  rewards = np.array([[1.0, 1], [1, 2], [3, 1], [np.nan, 1]], np.float32)
  values = {"a": A, "b": OTHER}
  scores = GroupRewards(rewards, values, rewards < 0, [[], [], [], []])
  ends = np.array([[1, 1], [0, 1], [0, 0], [1, 1]], bool)
  samples = samples_of(np.ones((4, 2, 1)), ends)
  both = {"reward__functions": ("a", "b"), "reward__weights": (1.0, 1.0)}
  settings = job_settings(**both | changes)
  varied = dynamic_sampling.varying_groups(settings, samples, scores, right)
  np.testing.assert_array_equal(varied, expected)
