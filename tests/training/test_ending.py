"""Text at the end of a run."""

import importlib.util
import pathlib
import shlex

import jax
import pytest

from grpojax import train
from grpojax.runtime.cli import config_file
from grpojax.training.run import fit

SUMMARY = {
  "accuracy_before": 0.0625,
  "accuracy_before_interval": [0.025, 0.15],
  "accuracy_after": 0.984,
  "reward_before": 0.0625,
  "reward_after": 0.984,
  "accuracy_after_interval": [0.917, 0.997],
  "train_seconds": 214.0,
  "model_step": 40,
  "steps": 40,
  "eval_prompts": 64,
  "dropped_prompts": 0,
  "failed_rewards": 0,
  "steps_with": {"truncated": 0, "skipped_updates": 0},
}


def test_the_last_lines_name_accuracies_problems_and_files(
  tmp_path, settings_with
):
  for name in ("model", "metrics.jsonl"):
    (tmp_path / name).mkdir()

  def last_lines(**changes):
    settings = settings_with(model__path="some/model")
    return train.final_lines("runs/x", tmp_path, settings, SUMMARY | changes)

  plain = last_lines(best_step=35, best_accuracy=0.984)
  assert plain[:3] == [
    "accuracy before   6.2%  [2.5%, 15.0%]",
    "accuracy after   98.4%  [91.7%, 99.7%]"
    "  (greedy, 64 held-out prompts, 95% intervals)",
    "40 steps in 3m34s; results are in runs/x/:",
  ]
  assert "model/" in plain[3] and "metrics.jsonl" in plain[3]
  lines = last_lines(
    best_step=35,
    best_accuracy=0.99,
    reward_before=None,
    failed_rewards=3,
    steps_with={"truncated": 2},
    optimal_group_size=4.0,
    optimal_group_size_interval=[1.5, None],
    gradient_error_of_best=1.21,
    **{"sums/accuracy_before": 0.1, "sums/accuracy_after": 0.75},
  )
  unscored = "(no reward could be computed, which counts as wrong)"
  assert lines[0].endswith(unscored) and not lines[1].endswith(unscored)
  assert lines[2 : -len(plain[2:])] == [
    "accuracy best    99.0%  after step 35, chosen on these prompts",
    "  sums: 10.0% -> 75.0%",
    "best group size by gradient noise: 4.0 [1.5, inf]; this run's groups have "
    "1.21 times the error of the best",
    "steps with truncated: 2",
    "failed rewards: 3",
  ]


@pytest.mark.parametrize("where", ["runs/x", "/tmp/a run's/", "gs://b/runs/x"])
def test_commands_can_be_pasted_into_a_shell(where, settings_with):
  settings = settings_with(model__path="my model")
  commands = train.commands(where, settings)
  for command in commands.values():
    python, m, module, first, *rest = shlex.split(command)
    assert (python, m) == ("python", "-m")
    assert importlib.util.find_spec(module)
    assert where in (first, first.removeprefix("--model="))
    assert all(word.startswith(("--compare=my m", "--out=")) for word in rest)
  last = pathlib.PurePath(where).name
  assert shlex.split(commands["export"])[-1] == f"--out={last}-model"
  settings = settings_with(model__path="arithmetic-instruct")
  real = train.commands(where, settings)["a real model"]
  assert real.rpartition("--config=")[2] in config_file.packaged()


def test_exhausted_memory_ends_with_an_error_message(
  tmp_path, settings_with, monkeypatch
):
  def open_all(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")

  monkeypatch.setattr(fit.open_run, "settle", lambda settings, _: settings)
  monkeypatch.setattr(fit.open_run, "open_all", open_all)
  with pytest.raises(SystemExit, match="out of memory .*optim.micro_batches"):
    fit.run(settings_with(), tmp_path, lambda: None)
