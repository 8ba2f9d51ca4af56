"""Prompts drawn by their success rates, in a run."""

import json

import jax
import numpy as np
import pytest

from grpojax.core.step import init_state
from grpojax.data import arithmetic
from grpojax.data.pipeline import Mixture, Part
from grpojax.models import huggingface as hf
from grpojax.models import sharding
from grpojax.runtime.processes import distributed
from grpojax.training import policy as policy_lib
from grpojax.training.optimizer import optimizer
from grpojax.training.step import difficulty

ON = {"difficulty__priority": "varies"}
EXAMPLES = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(20)]


@pytest.mark.parametrize(
  "examples, message",
  [
    (arithmetic.load("train"), "without end asks no prompt twice"),
    (EXAMPLES, "takes 32 prompts of a data set, and there are 20"),
    # Of a mixture, each has to have its share.
    (
      Mixture([Part("many", 1.0, EXAMPLES * 10), Part("few", 3.0, EXAMPLES)]),
      "takes 24 prompts .* there are 20",
    ),
  ],
)
def test_data_that_cannot_have_success_rates(examples, message, settings_with):
  with pytest.raises(ValueError, match=message):
    difficulty.init_rates(settings_with(**ON), examples)
  two_rows = settings_with(**ON, difficulty__rows=2)
  assert difficulty.init_rates(two_rows, EXAMPLES).successes.shape == (20,)
  assert difficulty.init_rates(settings_with(), EXAMPLES) is None


@pytest.fixture
def drawn(settings_with, one_device):
  """A state of which three prompts are known, and the draw."""
  settings = settings_with(
    **ON,
    batch_size=4,
    difficulty__uniform=0.1,
    difficulty__importance_weights=True,
  )
  policy = policy_lib.open_policy("arithmetic-instruct")
  tx = optimizer(settings)
  state = init_state({"w": np.zeros(2)}, tx, jax.random.key(0))
  state = state.replace(difficulty=difficulty.init_rates(settings, EXAMPLES))
  shardings = sharding.shardings(jax.eval_shape(lambda: state), one_device)
  learn = difficulty.make_update_success_rates(settings, shardings)
  draw = difficulty.make_draw_prompts(settings, policy, EXAMPLES, 8)
  return state, learn, draw


@pytest.mark.slow
def test_what_varies_is_asked(drawn):
  state, learn, draw = drawn
  examples = [{difficulty.INDEX: i} for i in range(20)]
  # All but the first four are solved; a reward of 0.5 is no right answer.
  right = np.ones((20, 8))
  right[:4, ::2] = 0.5
  right[19] = np.nan
  for _ in range(5):
    state = learn(state, examples, right)
  successes = np.asarray(state.difficulty.successes)
  assert successes[0] == pytest.approx(successes[5] / 2)
  assert successes[19] == state.difficulty.failures[19] == 0
  counts, weights = np.zeros(20), np.zeros(20)
  for step in range(200):
    prompts, batch = draw(state.replace(step=step))
    asked = [example[difficulty.INDEX] for example in batch]
    assert [e["prompt"] for e in batch] == [f"{i}+1" for i in asked]
    assert len(set(asked)) == 4 and prompts.prompt_ids.shape[0] == 4
    counts[asked] += 1
    weights[asked] += np.asarray(prompts.weights) / 4
  # The first four, and the one of which nothing is known.
  assert counts[[0, 1, 2, 3, 19]].sum() > 500  # of 800; 200 without priorities
  assert counts[4:19].min() > 0  # a chance to come back
  # The weights undo it: each prompt counts the same in the end.
  np.testing.assert_allclose(weights.sum(), 200, rtol=0.1)
  np.testing.assert_allclose(weights[:4].mean(), 10, rtol=0.15)
  row = difficulty.metrics(state, prompts, batch)
  assert row["prompts_seen"] == 19 / 20 and row["prompts_asked"] == 4
  assert 1 <= row["effective_prompts"] <= 4
  assert row["importance_weight_max"] == pytest.approx(prompts.weights.max())


def test_all_processes_ask_what_the_first_one_chose(drawn, monkeypatch):
  """Whatever this one, which is not the first, would have."""
  state, _, draw = drawn
  chosen = [7, 1, 19, 3], [0.5, 2.0, 0.1, 1.0]
  sent = iter([[None, None], [chosen, None]])  # nobody's error; the first's
  monkeypatch.setattr(distributed, "several", lambda: True)
  monkeypatch.setattr(distributed, "is_main", lambda: False)
  monkeypatch.setattr(distributed, "gather", lambda _: next(sent))
  prompts, batch = draw(state)
  found = [(example[difficulty.INDEX], example["prompt"]) for example in batch]
  assert found == [(7, "7+1"), (1, "1+1"), (19, "19+1"), (3, "3+1")]
  np.testing.assert_array_equal(prompts.weights, np.float32(chosen[1]))


def test_a_curriculum_goes_from_easy_to_hard(settings_with):
  settings = settings_with(difficulty__priority="target", steps=5)
  aims = [difficulty._aim(settings, step) for step in range(5)]
  np.testing.assert_allclose(aims, [0.8, 0.675, 0.55, 0.425, 0.3])


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_ended(train_toy, tmp_path):
  """With a mixture, success rates and importance weights."""
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
  models = (hf.load_params(tmp_path / x / "model") for x in ("parts", "whole"))
  jax.tree.map(np.testing.assert_array_equal, *models)
  steps = [row for row in rows if "reward_mean" in row]
  tested = [row for row in rows if "accuracy" in row]
  for row in steps:
    assert row["many/prompts"] == 3 and row["few/prompts"] == 1
    mean = (3 * row["many/reward_mean"] + row["few/reward_mean"]) / 4
    assert row["reward_mean"] == pytest.approx(mean, rel=1e-5)
  seen = [row["prompts_seen"] for row in steps]
  assert seen[0] == 0 and np.all(np.diff(seen) > 0)
  for row in tested:
    both = (row["many/accuracy"] + row["few/accuracy"]) / 2
    assert row["accuracy"] == pytest.approx(both) and row["prompts"] == 8
  summary = json.loads((tmp_path / "parts" / "summary.json").read_text())
  assert summary["few/accuracy_after"] == tested[-1]["few/accuracy"]
