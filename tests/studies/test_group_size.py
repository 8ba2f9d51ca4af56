"""The study of group sizes: runs, tables, and a small one from start to end."""

import csv
import json
import pathlib
import runpy

import numpy as np
import pytest

from grpojax.runtime import config as config_lib
from grpojax.runtime import records
from grpojax.studies import group_size, group_size_results, training_runs
from grpojax.studies import run as study
from grpojax.training import fit, run_config, run_directory
from grpojax.training.config import validate

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_run_spends_the_same_samples():
  config = group_size.default_config()
  for seed, budget, size in group_size._points(config):
    run = group_size.train_config(config, budget, size, seed)
    validate(run)
    first = run.auto_group_size.start if size == "auto" else size
    assert run.batch_size * first == budget and run.seed == seed
    assert bool(run.diagnostics.every) == (size == "auto")


def test_the_papers_setting_is_valid():
  config = runpy.run_path(str(ROOT / "configs/figure5.py"))["get_config"]()
  assert group_size.problems(config) == []
  assert config.seeds == 5 and config.budgets == (1024,)
  assert config.group_sizes == (4, 8, 16, 32, 64, 128)
  names = {
    group_size.train_config(config, budget, size, seed).name
    for seed, budget, size in group_size._points(config)
  }
  assert len(names) == 5 * 7


def refusal(words):
  with pytest.raises(SystemExit) as caught:
    group_size.main(words)
  message = caught.value.code
  assert message.startswith("error: ")
  return message


@pytest.mark.parametrize(
  "word, hint",
  [
    ("--config.seeds=1", "an interval needs 2"),
    ("--config.budgets=(100,)", "8 does not divide the budget 100"),
    ("--config.group_sizes=(1,)", "2 or more"),
    ("--config.predict.prompts=90", "multiple of predict.batch"),
    ("--config.predict.tangents=1", "tangents"),
    ("--config.train.optim.learning_rate=-1", "optim.learning_rate"),
    ("--config.train.steps=many", "type int"),
    ("--config.name=../../x", "names a directory"),
    (f"--config.train.seed={10**30}", "train.seed"),
    ("--config.buget=3", "budgets?"),
  ],
)
def test_mistakes_are_found_before_anything_is_written(
  word, hint, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  assert hint in refusal([word])
  assert not list(tmp_path.iterdir())


def test_somebody_elses_directory_is_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("mine")
  assert "is no study" in refusal([f"--run_dir={tmp_path}"])
  assert "is a file" in refusal([f"--run_dir={tmp_path / 'thesis.tex'}"])


@pytest.mark.parametrize(
  "name, text",
  [
    ("file/x", "file/x: Not a directory"),
    ("x" * 300, "name too long"),
    ("odd", "odd/config.json is no study's config: .*Is a directory"),
  ],
)
def test_a_directory_that_cannot_be_a_studys(name, text, tmp_path):
  (tmp_path / "file").touch()
  (tmp_path / "odd" / "config.json").mkdir(parents=True)
  argv = [f"--run_dir={tmp_path / name}"]
  with pytest.raises(SystemExit, match=f"^error: .*{text}"):
    study.open_study(argv, "p", group_size.SETTINGS, lambda config: [], "")


def test_a_study_in_a_bucket_is_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # where it would make the directory gs:
  argv = ["--run_dir=gs://bucket/study"]
  with pytest.raises(SystemExit, match="^error: .*is not a path of the file"):
    study.open_study(argv, "p", group_size.SETTINGS, lambda config: [], "")
  assert not list(tmp_path.iterdir())


def small(toy, toy_model):
  """A study of five runs of two steps on the toy task."""
  settings = {
    "seeds": 2,
    "budgets": (64,),
    "group_sizes": (8,),
    "predict.prompts": 8,
    "predict.batch": 4,
    "predict.group_size": 4,
    "predict.tangents": 2,
    "train.auto_group_size.start": 8,
    "train.auto_group_size.largest": 16,
    "train.steps": 2,
    "train.eval.every": 2,
    "train.eval.num_prompts": 4,
    "train.diagnostics.every": 1,
  }
  words = [f"--config.{key}={value}" for key, value in settings.items()]
  skipped = {"batch_size", "group_size", "name", *settings}
  for word in toy.arguments(toy_model):
    key = word.removeprefix("--config.").split("=")[0]
    if key not in skipped and f"train.{key}" not in skipped:
      words.append(word.replace("--config.", "--config.train."))
  return words


def made_up(config, directory):
  """What a study reads of a run of two steps."""
  directory.mkdir(parents=True)
  with open(directory / run_directory.METRICS, "w") as file:
    for step in (1, 2):
      row = {"step": step, "group_size": 8, "c1": 1.0, "c3": 4.0}
      row |= {"reward_mean": 0.1 * step + 0.01 * config.seed}
      file.write(json.dumps(row) + "\n")
    file.write(json.dumps({"step": 2, "accuracy": 0.5}) + "\n")
  text = config_lib.to_json(config)
  (directory / run_config.CONFIG).write_text(text)
  summary = {"steps": 2, "accuracy_before": 0.0, "accuracy_after": 0.5}
  records.write_json(directory / run_directory.SUMMARY, summary)
  return summary


@pytest.mark.slow
@pytest.mark.parametrize("train", [made_up, fit.run])
def test_a_small_study(
  train, toy_task, toy_model, tmp_path, monkeypatch, capsys
):
  argv = [*small(toy_task, toy_model), f"--run_dir={tmp_path / 'study'}"]
  calls = []

  def killed(config, directory):  # the third run never ends
    calls.append(config.name)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return train(config, directory)

  with monkeypatch.context() as patch:
    patch.setattr(fit, "run", killed)
    # Leave the session's compilation cache alone.
    patch.setattr(training_runs.jax.config, "update", lambda *args: None)
    with pytest.raises(SystemExit) as caught:
      group_size.main(argv)
    assert caught.value.code == 130
    assert not (tmp_path / "study" / "results.csv").exists()
    first = (tmp_path / "study" / "prediction.json").read_bytes()
    group_size.main(argv)
  assert len(calls) == 3 + 2 and calls[2] == calls[3]
  study = tmp_path / "study"
  assert (study / "prediction.json").read_bytes() == first
  assert (study / "group_size.png").read_bytes().startswith(b"\x89PNG")
  with open(study / "results.csv") as file:
    rows = list(csv.DictReader(file))
  assert [(r["budget"], r["run"]) for r in rows] == [
    ("64", "8"),
    ("64", "auto"),
  ]
  with open(study / "curves.csv") as file:
    curves = list(csv.DictReader(file))
  fixed = [r for r in curves if r["run"] == "8"]
  assert [(r["seed"], r["step"]) for r in fixed] == [
    ("0", "1"),
    ("0", "2"),
    ("1", "1"),
    ("1", "2"),
  ]
  mean = np.mean([float(r["reward"]) for r in fixed])
  np.testing.assert_allclose(float(rows[0]["reward"]), mean, rtol=1e-5)
  summary = json.loads((study / "summary.json").read_text())
  found = summary["measured"]["64"]
  assert found["best_group_size"] == found["worst_group_size"] == 8
  assert found["best_minus_worst"] == [0, 0, 0]
  assert "tables and picture" in capsys.readouterr().out


def test_no_diagnosis_of_an_automatic_run(
  toy_task, toy_model, tmp_path, monkeypatch, capsys
):
  """Too few prompts with rewards: nan at every diagnosis, null in the file."""

  def undiagnosed(config, directory):
    summary = made_up(config, directory)
    path = directory / run_directory.METRICS
    path.write_text(path.read_text().replace('"c1": 1.0', '"c1": null'))
    return summary

  monkeypatch.setattr(fit, "run", undiagnosed)
  monkeypatch.setattr(training_runs.jax.config, "update", lambda *args: None)
  ends = ("", "_low", "_high")
  unknown = {f"optimal_group_size{end}": None for end in ends}
  monkeypatch.setattr(group_size, "predict", lambda config: unknown)
  group_size.main([*small(toy_task, toy_model), f"--run_dir={tmp_path}/x"])
  summary = json.loads((tmp_path / "x" / "summary.json").read_text())
  assert summary["along_training"] == {"64": None}
  assert "G* along training nan" in capsys.readouterr().out


def test_best_and_worst_are_compared_by_seed():
  lines = [
    {"budget": 64, "run": run, "reward": np.mean(x), "rewards": x}
    for run, x in {
      "4": [0.1, 0.3, 0.2],
      "8": [0.4, 0.6, 0.5],
      "16": [0.3, 0.3, 0.3],
      "auto": [0.5, 0.6, 0.4],
    }.items()
  ]
  config = group_size.default_config().copy_and_resolve_references()
  config.budgets = (64,)
  found = group_size_results.compare(config, lines)["64"]
  assert found["best_group_size"] == 8 and found["worst_group_size"] == 4
  np.testing.assert_allclose(found["best_minus_worst"], [0.3] * 3, atol=1e-6)
  np.testing.assert_allclose(found["auto_minus_best"][0], 0, atol=1e-6)
  # Student's interval of the differences 0.1, 0 and -0.1.
  half = 4.302653 * 0.1 / np.sqrt(3)
  np.testing.assert_allclose(found["auto_minus_best"][2], half, rtol=1e-4)
