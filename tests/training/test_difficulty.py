"""Runs that draw prompts by their success rates."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from run_helpers import assert_same_weights

from grpojax.core.step import init_state
from grpojax.core.types import Prompts
from grpojax.data import arithmetic
from grpojax.data.pipeline import Mixture, Part
from grpojax.rewards.pool import GroupRewards
from grpojax.runtime.processes import distributed
from grpojax.training import policies
from grpojax.training.files.sources import find_files
from grpojax.training.run.setup import optimizer
from grpojax.training.step import scoring
from grpojax.training.step.extension import Drawn, Inputs, extended
from grpojax.training.step.extensions import difficulty

ON = {"difficulty__priority": "varies"}
EXAMPLES = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(20)]


@pytest.mark.parametrize(
  "examples, message",
  [
    (arithmetic.load("train"), "endless data set never repeats a prompt"),
    (EXAMPLES, "takes 32 prompts of a data set that has 20"),
    (
      Mixture([Part("many", 1.0, EXAMPLES * 10), Part("few", 3.0, EXAMPLES)]),
      "takes 24 prompts .* that has 20",
    ),
  ],
)
def test_endless_or_too_small_data_are_refused(
  examples, message, settings_with
):
  with pytest.raises(ValueError, match=message):
    difficulty.init_rates(settings_with(**ON), examples)
  two_rows = settings_with(**ON, difficulty__rows=2)
  assert difficulty.init_rates(two_rows, EXAMPLES).successes.shape == (20,)
  assert difficulty.init_rates(settings_with(), EXAMPLES) is None


@pytest.fixture
def drawn(settings_with, one_device, monkeypatch):
  """A state, and its functions to update success rates and to draw."""
  settings = settings_with(
    **ON,
    batch_size=4,
    difficulty__uniform=0.1,
    difficulty__importance_weights=True,
  )
  policy = policies.open_policy(find_files("arithmetic-instruct"))
  tx = optimizer(settings)
  state = init_state({"w": np.zeros(2)}, tx, jax.random.key(0))
  inputs = Inputs(*(settings, policy, tx, None, one_device), examples=EXAMPLES)
  extension = difficulty.extension(inputs)
  rates = jax.device_put(extension.init(), NamedSharding(one_device, P()))
  state = extended(state, difficulty=rates)

  def learn(state, examples, right):
    monkeypatch.setattr(scoring, "correctness", lambda *_: right)
    rewards = GroupRewards(right, {}, right > 1, [[]] * len(right))
    prompts = Prompts(
      np.zeros((len(right), 1), int), np.ones((len(right), 1), bool)
    )
    drawn = Drawn(None, rewards, examples, prompts)
    return extension.after_update(state, drawn, {})

  return state, learn, lambda state: extension.choose(state, 8)


@pytest.mark.slow
def test_prompts_that_vary_are_drawn_and_weighted(drawn):
  state, learn, draw = drawn
  examples = [{difficulty.INDEX: i} for i in range(20)]
  # All prompts but the first four are solved; a reward of 0.5 is not correct.
  right = np.ones((20, 8))
  right[:4, ::2] = 0.5
  right[19] = np.nan
  for _ in range(5):
    state = learn(state, examples, right)
  rates = state.extras["difficulty"]
  successes = np.asarray(rates.successes)
  assert successes[0] == pytest.approx(successes[5] / 2)
  assert successes[19] == rates.failures[19] == 0
  counts = np.zeros(20)
  weights = np.zeros(20)
  for step in range(200):
    prompts, batch = draw(state.replace(step=step))
    indices = [example[difficulty.INDEX] for example in batch]
    assert [e["prompt"] for e in batch] == [f"{i}+1" for i in indices]
    assert len(set(indices)) == 4 and prompts.prompt_ids.shape[0] == 4
    counts[indices] += 1
    weights[indices] += np.asarray(prompts.weights) / 4
  # The first four, and the prompt without rewards.
  assert counts[[0, 1, 2, 3, 19]].sum() > 500  # of 800; 200 without priorities
  assert counts[4:19].min() > 0
  # The weights give all prompts the same total weight.
  np.testing.assert_allclose(weights.sum(), 200, rtol=0.1)
  np.testing.assert_allclose(weights[:4].mean(), 10, rtol=0.15)
  row = difficulty.metrics(state, prompts, batch)
  assert row["prompts_seen"] == 19 / 20 and row["prompts_asked"] == 4
  assert 1 <= row["effective_prompts"] <= 4
  assert row["importance_weight_max"] == pytest.approx(prompts.weights.max())


def test_all_processes_use_the_draw_of_process_0(drawn, monkeypatch):
  state, _, draw = drawn
  chosen = [7, 1, 19, 3], [0.5, 2.0, 0.1, 1.0]
  sent = iter([[None, None], [chosen, None]])  # errors, then draws
  monkeypatch.setattr(distributed, "several", lambda: True)
  monkeypatch.setattr(distributed, "is_main", lambda: False)
  monkeypatch.setattr(distributed, "gather", lambda _: next(sent))
  prompts, batch = draw(state)
  pairs = [(example[difficulty.INDEX], example["prompt"]) for example in batch]
  assert pairs == [(7, "7+1"), (1, "1+1"), (19, "19+1"), (3, "3+1")]
  np.testing.assert_array_equal(prompts.weights, np.float32(chosen[1]))


def test_the_target_moves_from_easy_to_hard(settings_with):
  settings = settings_with(difficulty__priority="target", steps=5)
  aims = [difficulty._aim(settings, step) for step in range(5)]
  np.testing.assert_allclose(aims, [0.8, 0.675, 0.55, 0.425, 0.3])


@pytest.mark.slow
def test_a_resumed_run_with_a_mixture_equals_an_uninterrupted_run(
  train_toy, tmp_path
):
  settings = {"steps": 3, "eval.every": 9, "checkpoint.every": 1}
  settings |= {"batch_size": 4, "group_size": 4, "eval.num_prompts": 4}
  for name, size in (("many", 40), ("few", 9)):
    part = f"data.mixture.{name}"
    settings |= {f"{part}.name": "arithmetic", f"{part}.options.size": size}
  settings |= {"data.mixture.many.weight": 3, "difficulty.priority": "varies"}
  settings |= {"difficulty.importance_weights": True}
  train_toy("parts", **settings | {"steps": 1})
  rows = train_toy("parts", **settings)
  train_toy("whole", **settings)
  assert_same_weights(*(tmp_path / x / "model" for x in ("parts", "whole")))
  steps = [row for row in rows if "reward_mean" in row]
  for row in steps:
    assert row["many/prompts"] == 3 and row["few/prompts"] == 1
    mean = (3 * row["many/reward_mean"] + row["few/reward_mean"]) / 4
    assert row["reward_mean"] == pytest.approx(mean, rel=1e-5)
  seen = [row["prompts_seen"] for row in steps]
  assert seen[0] == 0 and np.all(np.diff(seen) > 0)
  tested = [row for row in rows if "accuracy" in row]
  for row in tested:
    both = (row["many/accuracy"] + row["few/accuracy"]) / 2
    assert row["accuracy"] == pytest.approx(both) and row["prompts"] == 8
  summary = json.loads((tmp_path / "parts" / "summary.json").read_text())
  assert summary["few/accuracy_after"] == tested[-1]["few/accuracy"]
