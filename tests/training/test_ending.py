"""Text at the end of a run."""

import importlib.util
import pathlib
import shlex

import jax
import pytest

from grpojax import train
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


def test_the_end_says_gain_and_files(tmp_path, last_lines, settings_with):
  for name in ("model", "learning_curve.png", "metrics.jsonl"):
    (tmp_path / name).mkdir()
  lines = last_lines()
  assert lines[:4] == [
    "accuracy before   6.2%  [2.5%, 15.0%]",
    "accuracy after   98.4%  [91.7%, 99.7%]"
    "  (greedy, 64 held-out prompts, 95% intervals)",
    "40 steps in 3m34s; results are in runs/x/:",
    "  model/ (of step 40, Hugging Face format), learning_curve.png, "
    "metrics.jsonl",
  ]
  settings = settings_with(model__path="some/model")
  assert lines[4:] == train.next_steps("runs/x", settings)
  assert max(map(len, lines)) < 100


def test_the_end_says_what_went_wrong_and_each_data_set(last_lines):
  sets = {"sums/accuracy_before": 0.1, "sums/accuracy_after": 0.75}
  troubles = {"failed_rewards": 3, "steps_with": {"truncated": 2}}
  assert last_lines(**sets, **troubles)[2:5] == [
    "  sums: 10.0% -> 75.0%",
    "steps with truncated: 2",
    "rewards that failed: 3",
  ]


def test_graded_rewards_stand_beside_the_accuracy(last_lines):
  first, second, *_ = last_lines(reward_before=0.3, reward_after=0.62)
  assert first.endswith("  mean reward 0.3 (right: 1 or more)")
  assert "mean reward 0.62" in second


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


@pytest.mark.parametrize("best, shown", [(0.99, True), (0.984, False)])
def test_a_best_step_is_named_where_it_was_better(best, shown, last_lines):
  lines = last_lines(best_step=35, best_accuracy=best)
  assert any("accuracy best" in line for line in lines) == shown


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
  name = "a real model"
  settings = settings_with(model__path="arithmetic-instruct")
  real = train.commands("runs/x", settings)[name]
  assert real.endswith(f"--config={config}")
  root = pathlib.Path(__file__).resolve().parents[2]
  config_file = root / "configs" / f"{real.partition('--config=')[2]}.py"
  assert config_file.is_file()
  for path in ("Qwen2.5", "/", ".", "runs/x"):
    settings = settings_with(model__path=path)
    assert name not in train.commands("runs/x", settings)


def test_too_little_memory_is_a_sentence(tmp_path, settings_with, monkeypatch):
  def open_all(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")

  monkeypatch.setattr(fit.open_run, "settle", lambda settings, _: settings)
  monkeypatch.setattr(fit.open_run, "open_all", open_all)
  with pytest.raises(SystemExit, match="out of memory .*optim.micro_batches"):
    fit.run(settings_with(), tmp_path, lambda: None)
