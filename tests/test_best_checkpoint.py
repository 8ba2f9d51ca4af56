"""Runs that keep their best state, and runs that end early."""

import json

import jax
import numpy as np
import pytest

from grpojax import chat, evaluate, export, train
from grpojax.models import huggingface as hf
from grpojax.runtime import checkpoint
from grpojax.training.report import reporting


@pytest.fixture
def accuracies(monkeypatch):
  """What evaluations say, by step, instead of decoding."""
  said = {}

  def evaluated(run, params, step, check_signals):
    row = {"step": step, "accuracy": said.get(step, 0.0), "prompts": 10}
    row |= {"accuracy_low": 0.0, "accuracy_high": 1.0}
    reporting.record(run, row)
    return row

  monkeypatch.setattr(reporting, "evaluate_held_out", evaluated)
  return said


def arguments(toy, toy_model, run, **changes):
  options = {"eval.every": 1, "checkpoint.every": 2, "checkpoint.keep": 1}
  options |= {"checkpoint.best": True, "steps": 5}
  return [
    *toy.arguments(toy_model, **options | changes),
    f"--run_dir={run}",
  ]


def saved(run):
  with checkpoint.open_checkpointer(run / "checkpoints", readonly=True) as all_:
    return checkpoint.steps(all_)


def summary(run):
  return json.loads((run / "summary.json").read_text())


def flat(directory):
  leaves = jax.tree.leaves(hf.load_params(directory))
  return np.concatenate([np.ravel(x) for x in leaves])


@pytest.mark.slow
def test_the_best_state_is_kept_and_is_the_model(
  toy, toy_task, toy_model, tmp_path, accuracies, capsys
):
  accuracies |= {1: 0.3, 3: 0.7, 4: 0.5, 5: 0.6}
  run = tmp_path / "run"
  train.main(arguments(toy, toy_model, run))
  assert saved(run) == [3, 5]  # the newest, and the best
  found = summary(run)
  assert (found["best_step"], found["model_step"]) == (3, 3)
  assert found["accuracy_after"] == 0.6 and found["steps"] == 5
  step = json.loads((run / "model" / "step.json").read_text())
  assert step == {"step": 3, "of_steps": 5}
  said = capsys.readouterr().out
  assert "accuracy best    70.0%  after step 3" in said
  assert f"--model={run} --out=run-model --best" in said
  export.main([f"--model={run}", f"--out={tmp_path / 'best'}", "--best"])
  export.main([f"--model={run}", f"--out={tmp_path / 'last'}"])
  assert "step 3 of" in (out := capsys.readouterr().out) and "step 5 of" in out
  best, last = flat(tmp_path / "best"), flat(tmp_path / "last")
  np.testing.assert_array_equal(flat(run / "model"), best)
  assert (best != last).any()
  # More steps go on from the last state, and know the best.
  accuracies |= {6: 0.65}
  train.main(arguments(toy, toy_model, run, steps=6))
  assert saved(run) == [3, 6] and summary(run)["model_step"] == 3


@pytest.mark.slow
def test_a_run_that_gains_nothing_ends_early_and_is_finished(
  toy, toy_task, toy_model, tmp_path, accuracies, capsys
):
  accuracies |= {1: 0.3, 2: 0.2, 3: 0.3, 4: 0.9}
  run = tmp_path / "run"
  options = {"stop.no_improvement": 2, "checkpoint.best": False}
  train.main(arguments(toy, toy_model, run, **options))
  said = capsys.readouterr().out
  assert "no higher held-out accuracy in 2 evaluations" in said
  found = summary(run)
  assert found["steps"] == 3 and found["model_step"] == 3
  assert saved(run) == [3] and (run / "model" / "config.json").exists()
  train.main(arguments(toy, toy_model, run, **options))
  assert "is finished: nothing to do" in capsys.readouterr().out
  # Where the limit is taken away, it goes on to its last step.
  options["stop.no_improvement"] = 0
  train.main(arguments(toy, toy_model, run, **options))
  assert summary(run)["steps"] == 5 and summary(run)["best_step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("program", [evaluate, chat, export])
def test_best_needs_a_run_that_keeps_it(program, toy_task, toy_run, tmp_path):
  words = [f"--model={toy_run.directory}", "--best"]
  words += [f"--out={tmp_path / 'out'}"] if program is export else []
  with pytest.raises(SystemExit, match="error: --best: .* has kept no best"):
    program.main(words)
