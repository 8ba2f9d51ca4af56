"""Rewards of a batch: functions, a reward model, and their aggregation."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import programs
from grpojax.core import advantages
from grpojax.core.advantages import multi_reward
from grpojax.models import huggingface as hf
from grpojax.rewards import exact, pool
from grpojax.rewards.pool import Failure, GroupRewards, all_failures
from grpojax.runtime.files import records
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.step import batch as batch_lib
from grpojax.training.step import scoring
from grpojax.training.step.episodes import sampled

REWARDS = """
def length(prompt, completion, example):
  return float(len(completion))

def picky(prompt, completion, example):
  if completion == "bad":
    raise RuntimeError("no")
  return None if completion == "silent" else 10.0

def seen(prompt, completion, example):
  assert prompt == "p" and example["answer"] == "1"
  assert example["max_completion_length"] == 5
  return example["completion_length"] + 0.5 * example["finished"]
"""
EXAMPLES = [{"prompt_text": "p", "answer": "1"}] * 2
TEXTS = [["ab", "bad"], ["silent", "abc"]]
NAN = np.nan


@pytest.fixture
def score(word_policy, settings_with, samples_of, tmp_path, monkeypatch):
  """`(weights by name, model) -> (pool, rewards)` of `TEXTS`.

  A row has a finished sample of four tokens, and a truncated one of one token.
  """
  monkeypatch.setattr(policies, "decode", lambda *_: TEXTS)
  file = tmp_path / "rewards.py"
  file.write_text(REWARDS)

  def score(weights, model=None, rows=2, **changes):
    settings = settings_with(
      reward__functions=[f"{file}:{name}" for name in weights],
      reward__weights=[*weights.values()],
      **changes,
    )
    mask = np.arange(5) < np.array([4, 1])[:, None]
    mask = np.broadcast_to(mask, (rows, 2, 5))
    samples = sampled(samples_of(mask, [True, False]))
    with scoring.open_reward_pool(settings, model) as reward_pool:
      return reward_pool, scoring.compute_rewards(
        word_policy(None), reward_pool, EXAMPLES, samples
      )[1]

  return score


def test_weighted_functions(score):
  # The third row is padding.
  weights = {"length": 2.0, "picky": 0.5, "seen": 1.0}
  reward_pool, scores = score(weights, rows=3)
  expected = [[4 + 5 + 4.5, NAN], [12 + 4.5, 6 + 5 + 1]]
  np.testing.assert_allclose(scores.rewards, expected)
  np.testing.assert_array_equal(scores.failed, [[0, 1], [0, 0]])
  (failure,) = all_failures(scores)
  assert failure.function == "picky" and failure.completion == "bad"
  right = scoring.correctness(reward_pool, scores, EXAMPLES)
  np.testing.assert_array_equal(right, [[2, 3], [6, 3]])
  assert scoring.metrics(scores) == {
    "reward_failures": 1,
    "rewards/length/mean": 3.5,
    "rewards/length/std": 1.5,
    "rewards/picky/mean": 10,
    "rewards/picky/std": 0,
    "rewards/seen/mean": pytest.approx((4.5 + 1 + 4.5 + 1) / 4),
    "rewards/seen/std": 1.75,
  }


def test_a_reward_model_is_added_to_functions(score):
  model = lambda examples, texts: np.array([[1.0, 2.0], [3.0, 4.0]])
  _, scores = score({"picky": 1.0}, model, reward__model_weight=-2.0)
  # It counts if the function abstains, but not if the function fails.
  np.testing.assert_allclose(scores.rewards, [[8, NAN], [-6, 2]])
  assert scoring.metrics(scores)["rewards/reward.model/mean"] == 2.5
  model = lambda examples, texts: np.array([[np.inf, 2.0], [1e16, 0.5]])
  _, scores = score({"length": 1.0}, model)
  np.testing.assert_allclose(scores.rewards, [[NAN, 5], [NAN, 3.5]])
  reasons = [(x.reason, x.completion) for x in all_failures(scores)]
  large = f"returned {np.float32(1e16)}"
  assert reasons == [("returned inf", "ab"), (large, "silent")]


def test_names_of_users_differ_from_metrics_of_the_run(score, tmp_path):
  names = ["mean", "std", "failures", "counts", "missing", "model", "mean_std"]
  numbers = dict.fromkeys(["mean", "std", "prompts", "a/b"], 7.0)
  text = f"def mean(p, c, e): return {numbers | {'score': 5.0}}\n"
  text += "".join(f"{name} = mean\n" for name in names[1:])
  (tmp_path / "rewards.py").write_text(text)
  model = lambda examples, texts: np.ones((2, 2))
  row = scoring.metrics(score(dict.fromkeys(names, 1.0), model)[1])
  assert row.pop("reward_failures") == 0
  assert len(row) == 2 * (len(names) + 1) + 4 * len(names)
  assert all(name.count("/") >= 2 for name in row)
  values = {name: row[f"rewards/{name}/mean"] for name in names}
  assert values == dict.fromkeys(names, 5)
  assert row["rewards/reward.model/mean"] == 1


def test_gathered_rewards_equal_those_of_one_process(monkeypatch):
  sizes = (3, 3)  # prompts per part, split unequally
  names = np.arange(12).reshape(6, 2)
  failed = names % 3 > 0
  rewards = np.where(failed, NAN, names).astype("f4")

  def failures(group):
    return [(Failure("f", "no", "p", str(x)),) * (x % 3) for x in group]

  def scores(rows, extras="ab"):
    return GroupRewards(
      rewards[rows],
      {"f": rewards[rows], "g": rewards[rows] + 1},
      failed[rows],
      [failures(names[i].tolist()) for i in rows],
      {f"f/{name}": rewards[rows] * 2 for name in extras},
    )

  sent = []
  gather = lambda x: sent.append(json.loads(json.dumps(x))) or (sent * 2)[:2]
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(distributed, "gather", gather)
  first = [0, 1, 3, 4]  # of process 0
  scoring._gather_rewards(scores(first, "a"), sizes)
  gathered = scoring._gather_rewards(scores([2, 5]), sizes)
  whole = scores(list(range(6)))
  jax.tree.map(np.testing.assert_array_equal, gathered[:3], whole[:3])
  whole.extras["f/b"][first] = NAN  # logged by process 1 only
  jax.tree.map(np.testing.assert_array_equal, gathered.extras, whole.extras)
  assert all_failures(gathered) == all_failures(whole)
  order = "".join(x.completion for x in all_failures(whole))
  assert order == "224881015571111"  # first completions, then second ones


@pytest.mark.slow
def test_training_with_a_reward_model(classifier, train_toy, tmp_path):
  settings = {"reward.model": classifier, "reward.model_weight": 2.0}
  settings |= {"reward.weights": "3", "steps": 2, "log.samples_every": 1}
  for row in train_toy(**settings):
    if "reward_mean" in row:
      right = row["rewards/exact_answer/mean"]
      parts = 3 * right + 2 * row["rewards/reward.model/mean"]
      assert row["reward_mean"] == pytest.approx(parts, rel=1e-4)
  # The model reads prompt and completion as one text.
  lm, params = hf.load(classifier)
  tokenizer = tokenization.load(classifier)
  seen = []
  for sample in records.read_jsonl(tmp_path / "run" / "samples.jsonl"):
    ids = tokenizer.encode(sample["prompt"] + sample["completion"])
    ids = jnp.array([ids])
    prefix = lm.prefill(params, ids, jnp.ones_like(ids, bool))
    score = float(lm.unembed(params, prefix.last_hidden)[0, 0])
    right = exact.exact_answer("", sample["completion"], sample)
    assert sample["reward"] == pytest.approx(3 * right + 2 * score, abs=1e-3)
    seen.append(score)
  assert np.ptp(seen) > 0.1


# Aggregation of several functions.

VALUES = {
  "right": np.array([[1, 0, 1], [0, 0, 1]], np.float32),
  "short": np.array([[3, NAN, 9], [5, 1, 1]], np.float32),
}
FAILED = np.array([[0, 0, 0], [0, 0, 1]], bool)
MASK = np.ones((2, 3, 4))
NORMALIZED = {"reward.aggregation": "normalize_then_sum"}


def scores_of(weights):
  total = sum(
    w * np.nan_to_num(v) for w, v in zip(weights, VALUES.values(), strict=True)
  )
  total = np.where(FAILED, NAN, total).astype(np.float32)
  return GroupRewards(total, VALUES, FAILED, [[[]] * 3] * 2)


@pytest.fixture
def program_of(tabular, settings_with):
  """`(samples, **settings)` -> `(rewards, **options) -> (batch, metrics)`."""

  def program_of(samples, **changes):
    b, g = samples.finished.shape
    sizes = {"batch_size": b, "group_size": g, "optim.micro_batches": 1}
    program = batch_lib.make_batch_program(settings_with(**sizes | changes))
    return jax.jit(functools.partial(program, tabular.lm(1, 3), None, samples))

  return program_of


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, scale", [("batch_std", 0.25), ("leave_one_out", None)]
)
def test_a_step_compares_aggregated_rewards(
  name, scale, program_of, samples_of
):
  weights = (1.0, -0.5)
  several = {"reward.functions": ("a", "b"), "reward.weights": weights}
  make_batch = program_of(
    samples_of(MASK), advantage=name, **several | NORMALIZED
  )
  scores = scores_of(weights)
  values = scoring.stack_values(scores)
  scale = scale and np.float32(scale)
  batch, row = make_batch(scores.rewards, values=values, scale=scale)
  compared = multi_reward.normalize_then_sum(jnp.asarray(values), weights)
  expected = advantages.ADVANTAGES[name](compared) * (scale or 1)
  np.testing.assert_allclose(batch.advantages, expected, rtol=1e-5, atol=1e-6)
  # Metrics are of the weighted sum.
  mean = np.nanmean(scores.rewards)
  np.testing.assert_allclose(row["reward_mean"], mean, rtol=1e-6)
  assert not batch.completion_mask[1, 2].any() and batch.advantages[1, 2] == 0


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e11])
def test_a_large_offset_of_a_group_keeps_its_differences(
  offset, settings_with, one_device
):
  # In float32, 1e8 + 1 is 1e8.
  raw = np.array([[0.0, 1, 1, 3], [4, 1, NAN, 2], [0.1, 0.7, 0.3, 0.1]])
  total = raw + np.array([[0.0], [offset], [0.0]])
  exact = pool.exact_enough(total)
  assert (exact.dtype == np.float32) == (not offset)
  scores = GroupRewards(exact, {"a": exact}, np.isnan(raw), [[[]]] * 3)
  for changes in ({}, NORMALIZED):
    settings = settings_with(advantage="grpo", **changes)
    placed, values = scoring.place_rewards(settings, scores, one_device)
    placed = np.asarray(placed if values is None else values[0])
    actual, expected = (x[1] - x[1, 0] for x in (placed, raw))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    expected = raw[[0, 2]].astype(np.float32)
    np.testing.assert_array_equal(placed[[0, 2]], expected)
  metrics = scoring.metrics(scores)
  if offset:
    assert metrics["reward_mean"] == np.nanmean(total)
    assert metrics["reward_std"] == np.nanstd(total)
  # Advantages across groups use unshifted rewards.
  settings = settings_with(advantage="shrinkage")
  placed, _ = scoring.place_rewards(settings, scores, one_device)
  np.testing.assert_array_equal(placed, total.astype(np.float32))


def test_rewards_that_differ_by_rounding_become_equal():
  equal = np.array([[0.1 + 0.2, 0.3], [1.0, 0.0]])
  assert pool.exact_enough(equal).dtype == np.float32
  # Float32 would change a difference of 0.1 by 3%.
  assert pool.exact_enough(1e5 + equal / 10).dtype == np.float64
  between = 2.0**24 + 1  # two numbers of float32
  near = np.array([[between, np.nextafter(between, np.inf)]])
  assert len(np.unique(pool.exact_enough(near))) == 1
  large = np.concatenate([equal, [[1e8, 1e8 + 1]]])
  exact = pool.exact_enough(large)
  np.testing.assert_array_equal(exact, [[0.3, 0.3], *large[1:]])


DROPPED = {"loss.truncated": "drop"}


@pytest.mark.slow
def test_dropped_completions_are_not_in_the_normalisation(
  program_of, samples_of
):
  several = {"reward.functions": ("a", "b"), "reward.weights": (1.0, 2.0)}
  samples = samples_of(np.ones((2, 4, 2)), [[True, True, False, True]] * 2)
  # The weighted sum of the first group is constant; in the second group only
  # the dropped completion differs.
  values = jnp.array(
    [[[1.0, 0, 9, 2], [1, 1, 5, 1]], [[0.0, 0.5, -4, -0.5], [0, 0, 3, 0]]]
  )
  make_batch = program_of(samples, **several | NORMALIZED | DROPPED)
  batch, row = make_batch(values[0] + 2 * values[1], values=values)
  assert row["zero_variance_groups"] == 0.5
  left = np.array([[1.0, 0, 2], [0.0, 0.5, -0.5]])
  normal = left - left.mean(-1, keepdims=True)
  normal = normal / normal.std(-1, ddof=1, keepdims=True)
  expected = 1.5 * (normal[0] + 2 * normal[1])
  actual = np.asarray(batch.advantages)
  np.testing.assert_allclose(actual[0, [0, 1, 3]], expected, rtol=1e-4)
  assert actual[0, 2] == 0 and not actual[1].any()


IN_REWARD = {"loss.beta": 0.1, "loss.kl": "k1", "loss.kl_placement": "reward"}


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, [1, 1, 0]),
    ({"loss.truncated": "mask"}, [1, 0, 0]),
    ({"loss.truncated": "drop"}, [1, 0, 0]),
    ({"loss.truncated": "mask", "loss.beta": 0.1}, [1, 0, 0]),
    # The penalty of a masked completion is part of the baseline.
    (IN_REWARD | {"loss.truncated": "mask"}, [1, 1, 0]),
    (IN_REWARD | {"loss.truncated": "drop"}, [1, 0, 0]),
  ],
)
def test_unused_completions_are_not_packed(
  changes, expected, settings_with, samples_of, one_device, monkeypatch
):
  planned = []
  plan = lambda lengths, *_: planned.append(lengths)
  monkeypatch.setattr(batch_lib.packing_layout, "plan", plan)
  samples = samples_of(np.ones((1, 3, 2)), [[True, False, True]])
  rewards = np.array([[1.0, 0.0, np.nan]], np.float32)
  settings = settings_with(**changes)
  batch_lib.plan_packing(settings, samples, rewards, one_device)
  off = settings_with(**changes, optim__packing=False)
  assert batch_lib.plan_packing(off, samples, rewards, one_device) is None
  np.testing.assert_array_equal(planned, [[2 * np.array(expected)]])


def test_the_scale_multiplies_clipped_advantages(program_of, samples_of):
  make_batch = program_of(samples_of(MASK), loss__advantage_clip=2.0)
  rewards = jnp.array([[3.0, 0, 0], [1.0, 0, 0]])
  batch, _ = make_batch(rewards, scale=np.float32(0.5))
  expected = [[1.0, -0.75, -0.75], [0.5, -0.25, -0.25]]
  np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_the_reward_model_has_the_last_weight(settings_with):
  changes = {"reward.model": "somewhere", "reward.model_weight": 3.0}
  settings = settings_with(reward__weights=(2.0,), **changes)
  assert tuple(batch_lib.reward_weights(settings.reward)) == (2.0, 3.0)
  assert batch_lib.aggregation(settings.reward) is None


@pytest.mark.slow
def test_programs_are_lowered_with_values_and_first_prompt(
  settings_with, one_device
):
  settings = settings_with(
    reward__functions=("exact_answer", "length"),
    reward__weights=(1.0, 1.0),
    filter_groups__enable=True,
    **NORMALIZED,
  )
  run = programs.open_run(settings, one_device)
  shapes = programs.lower(run, "reference").in_avals
  assert (2, 32, 8) in [x.shape for x in jax.tree.leaves(shapes)]
  drawn = programs.lower(run, "rollout").in_avals[0]
  assert jax.tree.leaves(drawn)[-1].shape == ()  # the first prompt's number
