"""The comparison of settings by training: runs, choice of rates, tables."""

import csv
import math
import pathlib

import numpy as np
import pytest

from grpojax.runtime.cli.settings import to_config
from grpojax.runtime.terminal import pictures
from grpojax.studies import compare
from grpojax.studies import run as study
from grpojax.training.run import fit


@pytest.mark.slow
def test_arms_differ_in_their_settings_only():
  config = to_config(compare.SETTINGS)
  config.train.seed = 40  # the seeds count from there
  config.train.steps = config.train.eval.num_prompts = 2
  assert compare.config_errors(config) == []
  runs = [
    compare.train_settings(config, arm, 1e-4, 3)
    for arm in range(len(config.arms))
  ]
  assert [run.loss.advantage for run in runs] == [
    "leave_one_out",
    "grpo",
    "length_weighted",
    "score_weighted",
  ]
  assert {(run.seed, run.optim.learning_rate) for run in runs} == {(43, 1e-4)}
  assert len({run.name for run in runs}) == len(runs)


def test_the_rate_of_the_highest_reward():
  nan = math.nan
  tuned = {(0, 0.1): 0.5, (0, 0.2): 0.7, (1, 0.1): nan, (1, 0.2): 0.1}
  assert compare.best_rates(tuned) == [0.2, 0.2]
  with pytest.raises(SystemExit, match=r"error: .*\[1\]"):
    compare.best_rates(tuned | {(1, 0.2): nan})


def test_differences_are_of_pairs():
  numbers = {"reward": np.array([[0.1, 0.5, 0.3], [0.2, 0.6, 0.4]])}
  first, second = compare.table(["a", "b"], [1.0, 2.0], numbers)
  assert first["reward_more"] == first["reward_more_high"] == 0
  np.testing.assert_allclose(second["reward"], 0.4)
  # Every pair differs by 0.1, whatever the seeds differ by.
  ends = [second[f"reward_more{x}"] for x in ("", "_low", "_high")]
  np.testing.assert_allclose(ends, 0.1)
  numbers = {"reward": np.array([[0.0, 0.0, 0.0], [0.1, 0.0, -0.1]])}
  line = compare.table(["a", "b"], [1.0, 2.0], numbers)[1]
  half = 4.302653 * 0.1 / np.sqrt(3)  # Student's, two degrees of freedom
  np.testing.assert_allclose(line["reward_more_high"], half, rtol=1e-5)


FILE = f"{pathlib.Path(__file__)}:judge"


@pytest.mark.parametrize("rates, panels", [([1.0], 2), ([1.0, 2.0], 3)])
def test_a_picture_names_its_lines_and_has_no_empty_panel(
  tmp_path, monkeypatch, rates, panels
):
  saved = []
  monkeypatch.setattr(pictures, "save_figure", lambda fig, _: saved.append(fig))
  rows = [{"arm": arm, "step": 1, "reward": 0.5} for arm in "ab"]
  tuned = {(i, rate): 0.0 for i in range(2) for rate in rates}
  lines = compare.table("ab", [1.0, 1.0], {"reward": np.ones((2, 3))})
  compare.draw(rows, tuned, lines, "reward", tmp_path / "x.png")
  axes = saved[0].axes
  assert len(axes) == panels
  legend = axes[0].get_legend().get_texts()
  assert [text.get_text() for text in legend] == ["a", "b"]


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
      "give a single one",
      ["difficulty.priority"],
    ),
  ],
)
def test_arms_are_compared_by_what_they_share(arm, refused, rewarded):
  config = to_config(compare.SETTINGS)
  config.arms = ("advantage=leave_one_out", arm)
  if "difficulty.priority" in arm:
    config.train.data.options.size = 64
  wrong = "\n".join(compare._incomparable(config))
  assert refused in wrong if refused else not wrong
  if rewarded is not None:
    assert compare.differing(config, compare.REWARDED) == rewarded


def test_other_rewards_leave_the_accuracy_to_compare(made_up, tmp_path, capsys):
  config = to_config(compare.SETTINGS)
  config.arms = ("advantage=leave_one_out", "sampling.temperature=0.7")
  config.seeds = 2
  runs = [
    [compare.train_settings(config, arm, 3e-4, seed) for seed in range(2)]
    for arm in range(2)
  ]
  for i, of_arm in enumerate(runs):
    for run in of_arm:
      made_up(
        run,
        study.training_run(tmp_path, run.name),
        [5.0 * i, 5.0 * i],
        0.5 + 0.1 * i,
      )
  tuned = {(arm, 3e-4): 0.0 for arm in range(2)}
  compare.write(config, tmp_path, tuned, [3e-4, 3e-4], runs)
  with open(tmp_path / "results.csv") as file:
    second = list(csv.DictReader(file))[1]
  assert float(second["accuracy_more"]) == pytest.approx(0.1)
  assert not any("reward" in name for name in second)
  said = capsys.readouterr().out
  assert "rewards are not compared: arms differ in sampling.temperature" in said


def arguments(toy, toy_model, directory):
  words = [
    word.replace("--config.", "--config.train.")
    for word in toy.arguments(toy_model)
    if not word.startswith("--config.name=")
  ]
  return [
    *words,
    "--config.arms=advantage=leave_one_out, advantage=grpo group_size=8",
    "--config.learning_rates=(0.001, 0.002)",
    "--config.seeds=3",
    "--config.train.steps=2",
    "--config.train.eval.num_prompts=4",
    f"--run_dir={directory}",
  ]


@pytest.mark.parametrize(
  "train",
  [
    pytest.param(None, marks=pytest.mark.slow),
    pytest.param(fit.run, marks=pytest.mark.long),
  ],
)
def test_a_small_comparison(
  train, toy_task, toy_model, tmp_path, interrupt_third, made_up, capsys
):
  argv = arguments(toy_task, toy_model, tmp_path / "x")

  def write(settings, directory):  # better at the rate 0.002
    reward = {"arm0": 0.1, "arm1": 0.2}[settings.name.split("-")[0]]
    reward += 0.01 * settings.seed
    reward += 0.1 * (settings.optim.learning_rate == 0.002)
    return made_up(
      settings, directory, [reward + 0.001, reward + 0.002], reward
    )

  calls = interrupt_third(train or write)
  with pytest.raises(SystemExit) as caught:
    compare.main(argv)
  assert caught.value.code == 130
  compare.main(argv)  # goes on: 2 arms x 2 rates x 2 seeds, then 2 x 3
  assert len(calls) == 1 + 8 + 6 and calls[2] == calls[3]
  with open(tmp_path / "x" / "results.csv") as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 2 and float(rows[0]["reward_more"]) == 0
  assert (tmp_path / "x" / "compare.png").read_bytes().startswith(b"\x89PNG")
  with open(tmp_path / "x" / "curves.csv") as file:
    assert len(list(csv.DictReader(file))) == 2 * 3 * 2
  if not train:
    assert [float(r["learning_rate"]) for r in rows] == [0.002, 0.002]
    np.testing.assert_allclose(float(rows[1]["reward_more"]), 0.1, atol=1e-6)
    assert (
      "learning rate 0.002 (at the edge: give others), mean reward 0.312, "
      "+0.100 [+0.100, +0.100]; mean accuracy 0.310, +0.100 ["
      in capsys.readouterr().out
    )
