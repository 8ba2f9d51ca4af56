"""The comparison of settings by training: runs, choice of rates, tables."""

import json
import math
import pathlib

import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpojax.runtime.cli.settings import to_config
from grpojax.studies import compare
from grpojax.studies import run as study
from grpojax.training.run import fit


def test_best_rates_have_the_highest_reward():
  tuned = np.array([[0.5, 0.7], [math.nan, 0.1]])
  assert compare.best_rates((0.1, 0.2), tuned) == [0.2, 0.2]
  tuned[1, 1] = math.nan
  with pytest.raises(SystemExit, match=r"error: .*\[1\]"):
    compare.best_rates((0.1, 0.2), tuned)


FILE = f"{pathlib.Path(__file__)}:judge"


def judge(prompt, completion, example):
  return float(completion == "1")


@pytest.mark.parametrize(
  "arm, refused, rewarded",
  [
    ("advantage=grpo environment.credit=trajectory", None, []),
    ("reward.workers=2 reward.timeout=9", None, []),
    ("data.options.difficulty=(2,3)", "differ in data.options.difficulty,", []),
    ("sampling.max_new_tokens=40", "differ in sampling.max_new_tokens,", []),
    (f"reward.functions={FILE},", "first of reward.functions", None),
    (
      f"reward.functions=exact_answer,{FILE} reward.weights=1,1",
      None,
      ["reward.functions", "reward.weights"],
    ),
    ("sampling.temperature=0.7", None, ["sampling.temperature"]),
    (
      "difficulty.priority=spread",
      "give a single rate",
      ["difficulty.priority"],
    ),
  ],
)
def test_incomparable_arms_are_refused(arm, refused, rewarded):
  config = to_config(compare.SETTINGS)
  config.arms = ("advantage=leave_one_out", arm)
  if "difficulty.priority" in arm:
    config.train.data.options.size = 64
  wrong = "\n".join(compare._incomparable(config))
  assert refused in wrong if refused else not wrong
  if rewarded is not None:
    assert compare.differing(config, compare.REWARDED) == rewarded


@pytest.mark.parametrize("rates, panels", [((3e-4,), 2), ((3e-4, 5e-4), 3)])
def test_arms_with_different_rewards_compare_by_accuracy(
  rates, panels, made_up, tmp_path, monkeypatch
):
  config = to_config(compare.SETTINGS)
  config.arms = ("advantage=leave_one_out", "sampling.temperature=0.7")
  config.seeds = 2
  config.learning_rates = rates
  for arm, seed in np.ndindex(2, 2):
    run = compare.train_settings(config, arm, 3e-4, seed)
    path = tmp_path / "runs" / run.name
    made_up(run, path, [5.0 * arm, 5.0 * arm], 0.5 + 0.1 * arm)
  monkeypatch.setattr(compare, "tune", lambda *_: np.zeros((2, len(rates))))
  results = compare.compute(config, tmp_path)
  second = results.tables["results"][1]
  assert second["accuracy_more"] == pytest.approx(0.1)
  assert not any("reward" in name for name in second)
  hint = "rewards are not compared: arms differ in sampling.temperature"
  assert hint in results.lines and results.panels == (1, panels)
  axes = study.new_figure((9, 3)).subplots(1, panels, squeeze=False)
  results.draw(axes)
  assert all(ax.has_data() for ax in axes[0])


@pytest.mark.parametrize(
  "train",
  [
    pytest.param(None, marks=pytest.mark.slow),
    pytest.param(fit.run, marks=pytest.mark.long),
  ],
)
def test_small_comparison_resumes_after_an_interruption(
  train, small, tmp_path, run_interrupted, made_up, capsys, rows_of
):
  settings = {
    "arms": "advantage=leave_one_out, advantage=grpo group_size=8",
    "learning_rates": "(0.001, 0.002)",
    "seeds": 3,
    "train.steps": 2,
    "train.eval.num_prompts": 4,
  }
  argv = [*small(settings), f"--run_dir={tmp_path / 'x'}"]

  def write(settings, directory):  # the rate 0.002 is better
    reward = {"arm0": 0.1, "arm1": 0.2}[settings.name.split("-")[0]]
    reward += 0.01 * settings.seed
    reward += 0.1 * (settings.optim.learning_rate == 0.002)
    rewards = [reward + 0.001, reward + 0.002]
    return made_up(settings, directory, rewards, reward)

  calls = run_interrupted(compare.main, argv, train or write)
  assert len(calls) == 1 + 2 * 2 * 2 + 2 * 3  # arms, rates, seeds
  rows = rows_of(tmp_path / "x" / "results.csv")
  assert len(rows) == 2 and float(rows[0]["reward_more"]) == 0
  assert (tmp_path / "x" / "compare.png").read_bytes().startswith(b"\x89PNG")
  summary = json.loads((tmp_path / "x" / "summary.json").read_text())
  assert summary["compared"] == ["reward", "accuracy"]
  assert summary["results"][1]["arm"] == "advantage=grpo group_size=8"
  assert len(rows_of(tmp_path / "x" / "curves.csv")) == 2 * 3 * 2
  if not train:
    assert [float(r["learning_rate"]) for r in rows] == [0.002, 0.002]
    assert_allclose(float(rows[1]["reward_more"]), 0.1, atol=1e-6)
    assert (
      "learning rate 0.002 (at the edge: try further rates), mean reward "
      "0.312, +0.100 [+0.100, +0.100]; mean accuracy 0.310, +0.100 ["
      in capsys.readouterr().out
    )
