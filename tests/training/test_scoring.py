"""Rewards of a batch: functions of text together with a reward model."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.models import huggingface as hf
from grpojax.rewards import exact, groups
from grpojax.rewards.pool import Failure
from grpojax.runtime.files import records
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.training import policy as policy_lib
from grpojax.training.config import default_config, from_config
from grpojax.training.step import rewards as rewards_lib
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


@pytest.fixture
def rewards(tmp_path):
  file = tmp_path / "rewards.py"
  file.write_text(REWARDS)

  def settings(weights, **changes):
    config = default_config()
    config.reward.functions = tuple(f"{file}:{name}" for name in weights)
    config.reward.weights = tuple(weights.values())
    config.reward.update(changes)
    return from_config(config)

  return settings


@pytest.fixture
def rollout(samples_of):
  """Two samples a row: of `length` tokens, finished, and of one, cut off."""

  def rollout(rows, length):
    mask = np.arange(5) < np.array([length, 1])[:, None]
    return samples_of(np.broadcast_to(mask, (rows, 2, 5)), [True, False])

  return rollout


@pytest.fixture
def score(tabular, monkeypatch):
  """`(reward_pool, samples) -> GroupRewards` of `TEXTS`."""
  policy = policy_lib.Policy(pathlib.Path(), tabular.lm(1, 3), None, (0,), 0)
  monkeypatch.setattr(policy_lib, "decode", lambda *_: TEXTS)
  return lambda *args: rewards_lib.compute_rewards(
    policy, args[0], EXAMPLES, sampled(args[1])
  )[1]


EXAMPLES = [{"prompt_text": "p", "answer": "1"}] * 2
TEXTS = [["ab", "bad"], ["silent", "abc"]]


def test_weighted_functions(rewards, score, rollout):
  settings = rewards({"length": 2.0, "picky": 0.5, "seen": 1.0})
  with rewards_lib.open_reward_pool(settings) as reward_pool:
    # A batch may have more rows: they only pad it.
    found = score(reward_pool, rollout(3, 4))
  expected = [[4 + 5 + 4.5, np.nan], [12 + 4.5, 6 + 5 + 1]]
  np.testing.assert_allclose(found.rewards, expected)
  np.testing.assert_array_equal(found.failed, [[0, 1], [0, 0]])
  (failure,) = groups.all_failures(found)
  assert failure.function == "picky" and failure.completion == "bad"
  right = rewards_lib.correctness(reward_pool, found, EXAMPLES)
  np.testing.assert_array_equal(right, [[2, 3], [6, 3]])
  row = rewards_lib.metrics(found)
  assert row == {
    "reward_failures": 1,
    "rewards/length/mean": 3.5,
    "rewards/length/std": 1.5,
    "rewards/picky/mean": 10,
    "rewards/picky/std": 0,
    "rewards/seen/mean": pytest.approx((4.5 + 1 + 4.5 + 1) / 4),
    "rewards/seen/std": 1.75,
  }


def test_a_reward_model_beside_functions(rewards, score, rollout):
  settings = rewards({"picky": 1.0}, model_weight=-2.0)
  model = lambda examples, texts: np.array([[1.0, 2.0], [3.0, 4.0]])
  with rewards_lib.open_reward_pool(settings, model) as reward_pool:
    found = score(reward_pool, rollout(2, 3))
  # It decides alone where the function abstains, but not where that failed.
  np.testing.assert_allclose(found.rewards, [[8, np.nan], [-6, 2]])
  assert rewards_lib.metrics(found)["rewards/reward.model/mean"] == 2.5


def test_no_name_of_a_function_or_of_its_numbers_is_a_metric_of_the_run(
  tmp_path, settings_with, score, rollout
):
  names = ["mean", "std", "failures", "counts", "missing", "model", "mean_std"]
  file = tmp_path / "named.py"
  numbers = dict.fromkeys(["mean", "std", "prompts", "a/b"], 7.0)
  file.write_text(f"def mean(p, c, e): return {numbers | {'score': 5.0}}\n")
  with file.open("a") as more:
    more.writelines(f"{name} = mean\n" for name in names[1:])
  settings = settings_with(
    reward__functions=[f"{file}:{name}" for name in names],
    reward__weights=[1.0] * len(names),
  )
  model = lambda examples, texts: np.ones((2, 2))
  with rewards_lib.open_reward_pool(settings, model) as reward_pool:
    row = rewards_lib.metrics(score(reward_pool, rollout(2, 3)))
  assert row.pop("reward_failures") == 0
  assert len(row) == 2 * (len(names) + 1) + 4 * len(names)
  assert all(name.count("/") >= 2 for name in row)
  values = {name: row[f"rewards/{name}/mean"] for name in names}
  assert values == dict.fromkeys(names, 5)
  assert row["rewards/reward.model/mean"] == 1


def test_several_processes_say_what_one_says(monkeypatch):
  """Also in what order rewards have failed: the first of them are kept."""
  shape, sizes = (5, 2), (3, 2)  # in two parts of unequal sizes
  failed = np.arange(10).reshape(shape) % 3 > 0
  rewards = np.where(failed, np.nan, np.arange(10).reshape(shape)).astype("f4")
  names = np.arange(10).reshape(shape).tolist()

  def failures(group):
    return [(Failure("f", "no", "p", str(x)),) * (x % 3) for x in group]

  def scores(rows, others="ab"):
    of_rows = [failures(names[i]) for i in rows]
    values = {"f": rewards[rows], "g": rewards[rows] + 1}
    extras = {f"f/{name}": rewards[rows] * 2 for name in others}
    given = rewards[rows], values, failed[rows], of_rows, extras
    return groups.GroupRewards(*given)

  said = []
  tell = lambda own: said.append(json.loads(json.dumps(own))) or (said * 2)[:2]
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(distributed, "gather", tell)
  rewards_lib._gather_rewards(scores([0, 1, 3], "a"), sizes)  # of process 0
  found = rewards_lib._gather_rewards(scores([2, 4]), sizes)
  whole = scores(list(range(5)))
  jax.tree.map(np.testing.assert_array_equal, found[:3], whole[:3])
  whole.extras["f/b"][[0, 1, 3]] = np.nan  # nobody there said it
  jax.tree.map(np.testing.assert_array_equal, found.extras, whole.extras)
  assert groups.all_failures(found) == groups.all_failures(whole)
  order = "".join(x.completion for x in groups.all_failures(whole))
  assert order == "224881557"  # first completions, then second ones


@pytest.mark.slow
def test_rewards_that_fail(train_toy, tmp_path, capsys):
  """They are counted and kept, take no part, and training goes on."""
  file = tmp_path / "mine.py"
  file.write_text(
    "import math\n"
    "def mine(prompt, completion, example):\n"
    "  if '5' in completion:\n"
    "    raise RuntimeError('a five')\n"
    "  return math.nan if '3' in completion else float('7' in completion)\n"
  )
  run, functions = tmp_path / "run", f"{file}:mine"
  rows = train_toy(steps=4, reward__functions=functions, diagnostics__every=2)
  failures = records.read_jsonl(run / "failures.jsonl")
  assert {f["function"] for f in failures} == {"mine"}
  assert any(
    "a five" in f["reason"] and "5" in f["completion"] for f in failures
  )
  for row in rows:
    if "accuracy" in row:
      continue
    assert row["rewards_missing"] == row["reward_failures"] / 64 > 0.1
    assert row["grad_norm"] >= 0 and row["skipped_updates"] == 0
  assert "rewards failed; the first: mine" in capsys.readouterr().out
  params = hf.load_params(run / "model")
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.fixture
def classifier(toy_model, tmp_path):
  """A reward model with the toy model's body and tokenizer."""
  path = tmp_path / "config"
  shutil.copytree(toy_model, path)
  hf_config = json.loads((path / "config.json").read_text())
  hf_config["architectures"] = ["LlamaForSequenceClassification"]
  hf_config["num_labels"] = 1
  (path / "config.json").write_text(json.dumps(hf_config))
  params = hf.load_params(toy_model)
  score = jax.random.normal(jax.random.key(0), (16, 1))
  hf.save(tmp_path / "classifier", params | {"score": score}, path)
  return tmp_path / "classifier"


@pytest.mark.slow  # a model more
def test_training_with_a_reward_model(classifier, train_toy, tmp_path):
  settings = {"reward.model": classifier, "reward.model_weight": 2.0}
  settings |= {"reward.weights": "3", "steps": 2, "log.samples_every": 1}
  for row in train_toy(**settings):
    if "reward_mean" in row:
      right, score = (
        row[f"rewards/{name}/mean"] for name in ("exact_answer", "reward.model")
      )
      parts = 3 * right + 2 * score
      assert row["reward_mean"] == pytest.approx(parts, rel=1e-4)
  # The model read prompt and completion as one text, token by token.
  lm, params = hf.load(classifier)
  tokenizer = tokenizer_lib.load(classifier)
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
