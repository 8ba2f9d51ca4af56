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


def test_the_end_says_the_gain_and_where_everything_is(tmp_path, settings_with):
  for name in ("model", "learning_curve.png", "metrics.jsonl"):
    (tmp_path / name).mkdir()
  settings = settings_with(model__path="some/model")
  lines = train.final_lines("runs/x", tmp_path, settings, SUMMARY)
  assert lines[:4] == [
    "accuracy before   6.2%  [2.5%, 15.0%]",
    "accuracy after   98.4%  [91.7%, 99.7%]"
    "  (greedy, 64 held-out prompts, 95% intervals)",
    "40 steps in 3m34s; results are in runs/x/:",
    "  model/ (of step 40, Hugging Face format), learning_curve.png, "
    "metrics.jsonl",
  ]
  assert lines[4:] == train.next_steps("runs/x", settings)
  assert max(map(len, lines)) < 100


def test_the_end_says_what_went_wrong_and_each_data_set(
  tmp_path, settings_with
):
  summary = SUMMARY | {"failed_rewards": 3, "steps_with": {"truncated": 2}}
  summary |= {"sums/accuracy_before": 0.1, "sums/accuracy_after": 0.75}
  lines = train.final_lines("runs/x", tmp_path, settings_with(), summary)
  assert lines[2:5] == [
    "  sums: 10.0% -> 75.0%",
    "steps with truncated: 2",
    "rewards that failed: 3",
  ]


def test_graded_rewards_stand_beside_the_accuracy(settings_with):
  summary = SUMMARY | {"accuracy_before": 0.0, "accuracy_after": 0.0}
  summary |= {"reward_before": 0.3, "reward_after": 0.62}
  lines = train.final_lines(
    "runs/x", pathlib.Path("x"), settings_with(), summary
  )
  assert lines[0].endswith("  mean reward 0.3 (right: 1 or more)")
  assert "mean reward 0.62" in lines[1]


def test_the_return_of_an_environment_stands_before_the_accuracy(settings_with):
  summary = SUMMARY | {"accuracy_before": 0.25}
  summary |= {"reward_before": -0.3, "reward_before_interval": [-0.5, -0.1]}
  settings = settings_with(
    environment__path="retry", reward__functions=("environment",)
  )
  first, second, *_ = train.final_lines(
    "runs/x", pathlib.Path("x"), settings, summary
  )
  expected = "return before -0.3  [-0.5, -0.1]  accuracy before  25.0%"
  assert first.startswith(expected)
  assert second.startswith("accuracy after")


@pytest.mark.parametrize("best, shown", [(0.99, True), (0.984, False)])
def test_a_best_step_is_named_where_it_was_better(best, shown, settings_with):
  summary = SUMMARY | {"best_step": 35, "best_accuracy": best}
  lines = train.final_lines(
    "runs/x", pathlib.Path("x"), settings_with(), summary
  )
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
def test_only_an_embedded_model_is_followed_by_a_real_one(
  settings_with, monkeypatch, backend, config
):
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


def test_a_device_without_memory_is_a_sentence(
  tmp_path, settings_with, monkeypatch
):
  def open_all(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")

  monkeypatch.setattr(fit.open_run, "settle", lambda settings, _: settings)
  monkeypatch.setattr(fit.open_run, "open_all", open_all)
  with pytest.raises(SystemExit, match="out of memory .*optim.micro_batches"):
    fit.run(settings_with(), tmp_path, lambda: None)
