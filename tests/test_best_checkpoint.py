"""checkpoint.best and stop.no_improvement in whole runs."""

import json

import pytest
from run_helpers import assert_same_weights

from grpojax import export, train
from grpojax.runtime import checkpoint
from grpojax.training.report import reporting


@pytest.fixture
def accuracies(monkeypatch):
  """Accuracy by step, which replaces evaluations."""
  by_step = {}

  def evaluated(run, params, step, check_signals):
    row = {"step": step, "accuracy": by_step.get(step, 0.0), "prompts": 10}
    row |= {"accuracy_low": 0.0, "accuracy_high": 1.0}
    reporting.record(run, row)
    return row

  monkeypatch.setattr(reporting, "evaluate_held_out", evaluated)
  return by_step


@pytest.fixture
def trained(toy_task, toy_model, tmp_path, capsys):
  """Trains to the end; returns summary, saved steps and output."""
  run = tmp_path / "run"

  def trained(**changes):
    options = {"eval.every": 1, "checkpoint.every": 2, "checkpoint.keep": 1}
    options |= {"checkpoint.best": True, "steps": 5} | changes
    words = toy_task.arguments(toy_model, **options)
    train.main([*words, f"--run_dir={run}"])
    summary = json.loads((run / "summary.json").read_text())
    folder = run / "checkpoints"
    with checkpoint.open_checkpointer(folder, readonly=True) as saved:
      return summary, checkpoint.steps(saved), capsys.readouterr().out

  return trained


@pytest.mark.slow
def test_the_best_state_is_kept_and_becomes_the_model(
  trained, tmp_path, accuracies, capsys
):
  accuracies |= {1: 0.3, 3: 0.7, 4: 0.5, 5: 0.6}
  run = tmp_path / "run"
  summary, saved, printed = trained()
  assert saved == [3, 5]  # the best and the newest
  assert (summary["best_step"], summary["model_step"]) == (3, 3)
  assert summary["accuracy_after"] == 0.6 and summary["steps"] == 5
  step = json.loads((run / "model" / "step.json").read_text())
  assert step == {"step": 3, "of_steps": 5}
  assert "accuracy best    70.0%  after step 3" in printed
  assert f"--model={run} --out=run-model --best" in printed
  export.main([f"--model={run}", f"--out={tmp_path / 'best'}", "--best"])
  export.main([f"--model={run}", f"--out={tmp_path / 'last'}"])
  printed = capsys.readouterr().out
  assert "step 3 of" in printed and "step 5 of" in printed
  assert_same_weights(run / "model", tmp_path / "best")
  with pytest.raises(AssertionError, match="not equal"):
    assert_same_weights(run / "model", tmp_path / "last")
  # More steps continue from the last state and keep the best.
  accuracies |= {6: 0.65}
  summary, saved, _ = trained(steps=6)
  assert saved == [3, 6] and summary["model_step"] == 3


@pytest.mark.slow
def test_a_run_without_improvement_finishes_early(
  trained, tmp_path, accuracies
):
  accuracies |= {1: 0.3, 2: 0.2, 3: 0.3, 4: 0.9}
  options = {"stop.no_improvement": 2, "checkpoint.best": False}
  summary, saved, printed = trained(**options)
  assert "no higher held-out accuracy in 2 evaluations" in printed
  assert summary["steps"] == 3 and summary["model_step"] == 3
  assert saved == [3] and (tmp_path / "run/model/config.json").exists()
  assert "is finished: nothing to do" in trained(**options)[2]
  # Without the limit the run continues to its last step.
  summary, *_ = trained(**options | {"stop.no_improvement": 0})
  assert summary["steps"] == 5 and summary["best_step"] == 4
