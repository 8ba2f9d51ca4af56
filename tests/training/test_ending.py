"""Text at the end of a run."""

import importlib.util
import math
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
  "accuracy_after_interval": [0.917, 0.997],
  "train_seconds": 214.0,
  "model_step": 40,
  "steps": 40,
  "eval_prompts": 64,
  "dropped_prompts": 0,
  "failed_rewards": 0,
  "steps_with": {"truncated": 0, "skipped_updates": 0},
}


@pytest.fixture
def last_lines(settings_with, tmp_path):
  """The lines at the end of a run whose summary has changes."""

  def last_lines(settings=None, **changes):
    settings = settings or settings_with(model__path="some/model")
    return train.final_lines("runs/x", tmp_path, settings, SUMMARY | changes)

  return last_lines


def test_the_end_says_gain_trouble_and_files(tmp_path, last_lines):
  for name in ("model", "learning_curve.png", "metrics.jsonl"):
    (tmp_path / name).mkdir()
  plain = last_lines(best_step=35, best_accuracy=0.984)
  assert plain[:4] == [
    "accuracy before   6.2%  [2.5%, 15.0%]",
    "accuracy after   98.4%  [91.7%, 99.7%]"
    "  (greedy, 64 held-out prompts, 95% intervals)",
    "40 steps in 3m34s; results are in runs/x/:",
    "  model/ (of step 40, Hugging Face format), learning_curve.png, "
    "metrics.jsonl",
  ]
  assert max(map(len, plain)) < 100
  sets = {"sums/accuracy_before": 0.1, "sums/accuracy_after": 0.75}
  lines = last_lines(
    reward_before=0.3,
    reward_after=0.62,
    best_step=35,
    best_accuracy=0.99,
    failed_rewards=3,
    steps_with={"truncated": 2},
    optimal_group_size=4.0,
    optimal_group_size_interval=[1.5, None],
    gradient_error_of_best=1.21,
    **sets,
  )
  assert lines[0].endswith("  mean reward 0.3 (right: 1 or more)")
  assert "mean reward 0.62" in lines[1]
  assert lines[2 : -len(plain[2:])] == [
    "accuracy best    99.0%  after step 35, chosen on these prompts",
    "  sums: 10.0% -> 75.0%",
    "best group size by gradient noise: 4.0 [1.5, inf]; this run's groups have "
    "1.21 times the error of the best",
    "steps with truncated: 2",
    "failed rewards: 3",
  ]


@pytest.mark.parametrize("high", [None, math.inf])
def test_a_group_size_may_be_left_open(high):
  sizes = {"optimal_group_size": None}
  sizes["optimal_group_size_interval"] = [1.0, high]
  assert "best group size is unknown" in train.group_size_line(sizes)


def test_an_environments_return_comes_first(last_lines, settings_with):
  rewards = {"reward__functions": ("environment",)}
  first, second, *_ = last_lines(
    settings_with(environment__path="retry", **rewards),
    reward_before=-0.3,
    reward_before_interval=[-0.5, -0.1],
  )
  expected = "return before -0.3  [-0.5, -0.1]  accuracy before   6.2%"
  assert first.startswith(expected)
  assert second.startswith("accuracy after")


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


@pytest.mark.parametrize(
  "backend, config",
  [("cpu", "smollm2"), ("gpu", train.REAL), ("tpu", train.REAL)],
)
def test_a_real_model_comes_next(settings_with, monkeypatch, backend, config):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  settings = settings_with(model__path="arithmetic-instruct")
  real = train.commands("runs/x", settings)["a real model"]
  assert real.endswith(f"--config={config}")
  assert config in config_file.packaged()
  for path in ("Qwen2.5", "/", ".", "runs/x"):
    settings = settings_with(model__path=path)
    assert "a real model" not in train.commands("runs/x", settings)


def test_too_little_memory_is_a_sentence(tmp_path, settings_with, monkeypatch):
  def open_all(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")

  monkeypatch.setattr(fit.open_run, "settle", lambda settings, _: settings)
  monkeypatch.setattr(fit.open_run, "open_all", open_all)
  with pytest.raises(SystemExit, match="out of memory .*optim.micro_batches"):
    fit.run(settings_with(), tmp_path, lambda: None)
