"""The comparison of settings by training: runs, choice of rates, tables."""

import csv
import json
import math

import numpy as np
import pytest

from grpojax.runtime import config as config_lib
from grpojax.runtime import records
from grpojax.runtime.settings import to_config
from grpojax.studies import compare, compare_results, training_runs
from grpojax.training import config as train_config_lib
from grpojax.training import fit, run_config, run_directory


def test_arms_differ_in_their_settings_only():
  config = to_config(compare.SETTINGS)
  config.train.seed = 40  # the seeds count from there
  assert compare.problems(config) == []
  runs = [
    compare.train_config(config, arm, 1e-4, 3)
    for arm in range(len(config.arms))
  ]
  train_config_lib.validate(runs[-1])
  assert [run.advantage for run in runs] == [
    "leave_one_out",
    "grpo",
    "length_weighted",
    "score_weighted",
    "norm_ratio",
  ]
  assert [run.diagnostics.every for run in runs] == [0, 0, 0, 0, 2]
  assert {(run.seed, run.optim.learning_rate) for run in runs} == {(43, 1e-4)}
  assert len({run.name for run in runs}) == len(runs)


@pytest.mark.parametrize(
  "word, hint",
  [
    ("--config.arms=advantage=grpo", "two or more"),
    ("--config.arms=advantage=grpo, advantage=grpo", "all different"),
    ("--config.arms=advantage=grpo, advantag=grpo", "did you mean"),
    ("--config.arms=advantage=grpo, advantage=nothing", "arm 'advantage=noth"),
    ("--config.arms=seed=1, advantage=grpo", "seed is set by the study"),
    ("--config.arms=steps=x, advantage=grpo", "type int"),
    (
      "--config.arms=group_size=8, group_size=4",
      "1536 completions a run, and 3072 of the first",
    ),
    ("--config.learning_rates=(0.0,)", "numbers above 0"),
    ("--config.learning_rates=(1e-4, 1e999)", "finite numbers above 0"),
    ("--config.learning_rates=(True, 1e-4)", "finite numbers above 0"),
    ("--config.learning_rates=(1e-4, 0.0001)", "the same"),
    ("--config.train.steps=0", "steps = 0: give 1 or more"),
    (
      "--config.arms=advantage=grpo, filter_groups.enable=True",
      "at equal samples",
    ),
    (
      "--config.arms=advantage=grpo, stop.no_improvement=2",
      "at equal samples",
    ),
    ("--config.arms=advantage=grpo, eval.num_prompts=3", "256 of the first"),
    ("--config.seeds=1", "an interval needs 2"),
    ("--config.tuning_seeds=0", "1 or more"),
    (f"--config.train.seed={2**32 - 1}", "train.seed"),
  ],
)
def test_mistakes_are_found_before_anything_is_written(
  word, hint, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as caught:
    compare.main([word])
  assert caught.value.code.startswith("error: ") and hint in caught.value.code
  assert not list(tmp_path.iterdir())


def test_the_rate_of_the_highest_reward():
  nan = math.nan
  tuned = {(0, 0.1): 0.5, (0, 0.2): 0.7, (1, 0.1): nan, (1, 0.2): 0.1}
  assert compare.best_rates(tuned) == [0.2, 0.2]
  with pytest.raises(ValueError, match=r"\[1\]"):
    compare.best_rates(tuned | {(1, 0.2): nan})


def test_differences_are_of_pairs():
  numbers = {"reward": np.array([[0.1, 0.5, 0.3], [0.2, 0.6, 0.4]])}
  first, second = compare_results.table(["a", "b"], [1.0, 2.0], numbers)
  assert first["reward_more"] == first["reward_more_high"] == 0
  np.testing.assert_allclose(second["reward"], 0.4)
  # Every pair differs by 0.1, whatever the seeds differ by.
  ends = [second[f"reward_more{x}"] for x in ("", "_low", "_high")]
  np.testing.assert_allclose(ends, 0.1)
  numbers = {"reward": np.array([[0.0, 0.0, 0.0], [0.1, 0.0, -0.1]])}
  line = compare_results.table(["a", "b"], [1.0, 2.0], numbers)[1]
  half = 4.302653 * 0.1 / np.sqrt(3)  # Student's, two degrees of freedom
  np.testing.assert_allclose(line["reward_more_high"], half, rtol=1e-5)


REWARDS = {"arm0": 0.1, "arm1": 0.2}  # what a made-up run earns, at rate 1


def made_up(config, directory):
  """What a study reads of a run of two steps, better at the rate 0.002."""
  directory.mkdir(parents=True)
  reward = REWARDS[config.name.split("-")[0]] + 0.01 * config.seed
  reward += 0.1 * (config.optim.learning_rate == 0.002)
  rows = [{"step": s, "reward_mean": reward + 0.001 * s} for s in (1, 2)]
  lines = [json.dumps(row) + "\n" for row in rows]
  lines.append(json.dumps({"step": 2, "accuracy": reward}) + "\n")
  (directory / run_directory.METRICS).write_text("".join(lines))
  text = config_lib.to_json(config)
  (directory / run_config.CONFIG).write_text(text)
  summary = {"steps": 2, "accuracy_before": 0.0, "accuracy_after": reward}
  records.write_json(directory / run_directory.SUMMARY, summary)
  return summary


def arguments(toy, toy_model, directory):
  words = [
    word.replace("--config.", "--config.train.")
    for word in toy.arguments(toy_model)
    if "name=" not in word.split("=")[0] + "="
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
  "train", [made_up, pytest.param(fit.run, marks=pytest.mark.long)]
)
def test_a_small_comparison(
  train, toy_task, toy_model, tmp_path, monkeypatch, capsys
):
  argv = arguments(toy_task, toy_model, tmp_path / "x")
  calls = []

  def killed(config, directory):  # the third run never ends
    calls.append(config.name)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return train(config, directory)

  monkeypatch.setattr(fit, "run", killed)
  # Leave the session's compilation cache alone.
  monkeypatch.setattr(training_runs.jax.config, "update", lambda *args: None)
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
  if train is made_up:
    assert [float(r["learning_rate"]) for r in rows] == [0.002, 0.002]
    np.testing.assert_allclose(float(rows[1]["reward_more"]), 0.1, atol=1e-6)
    assert "at the edge" in capsys.readouterr().out


@pytest.fixture
def study_of_one(tmp_path):
  """A study's directory with one finished run, and its config."""
  config = compare.train_config(to_config(compare.SETTINGS), 0, 1e-4, 0)
  made_up(config, training_runs.of(tmp_path, config.name))
  return tmp_path, config


@pytest.mark.parametrize(
  "file, text",
  [
    ("metrics.jsonl", ""),
    ("metrics.jsonl", "garbage"),
    ("metrics.jsonl", '{"step": 1, "reward_mean": 1.0}\n'),
    ("metrics.jsonl", '{"reward_mean": 1.0}\n'),
    (
      "metrics.jsonl",
      '{"step": 1, "reward_mean": "x"}\n{"step": 2, "reward_mean": 1.0}\n',
    ),
    ("summary.json", ""),
    ("summary.json", "[]"),
    ("summary.json", "{}"),
    ("summary.json", '{"steps": 2, "accuracy_after": null}'),
  ],
)
def test_a_damaged_run_is_not_read(file, text, study_of_one):
  directory, config = study_of_one
  assert compare_results.mean_reward(directory, config.name) > 0
  (training_runs.of(directory, config.name) / file).write_text(text)
  with pytest.raises(ValueError, match=rf"{file} .*delete .*{config.name} and"):
    training_runs.metrics(directory, config.name)
    training_runs.summary(directory, config.name)


def test_a_run_of_another_config_is_not_taken(study_of_one, monkeypatch):
  directory, config = study_of_one
  monkeypatch.setattr(fit, "run", lambda *args: pytest.fail("it trains"))
  training_runs.train_all([config], directory)  # finished
  with config.unlocked():
    config.seed += 1
  fresh = compare.train_config(to_config(compare.SETTINGS), 1, 1e-4, 0)
  with pytest.raises(SystemExit, match="another config"):
    training_runs.train_all([fresh, config], directory)


@pytest.mark.parametrize("code, said", [(130, True), (75, True), ("x", False)])
def test_a_run_that_is_stopped_says_so_on_the_screen(
  code, said, tmp_path, monkeypatch, capsys
):
  """What it prints itself is in its log."""

  def stopped(config, directory):
    print("in the log")
    raise SystemExit(code)

  monkeypatch.setattr(fit, "run", stopped)
  config = compare.train_config(to_config(compare.SETTINGS), 0, 1e-4, 0)
  with pytest.raises(SystemExit):
    training_runs.train_all([config], tmp_path)
  shown = capsys.readouterr().out
  assert "in the log" not in shown
  assert (f"{config.name} did not end; the same command" in shown) == said
