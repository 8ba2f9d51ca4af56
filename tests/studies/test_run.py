"""Directories and training runs of studies, and mistakes in settings."""

import dataclasses
import importlib
import re

import pytest

from grpojax.runtime.cli.settings import to_config
from grpojax.studies import compare, group_size
from grpojax.studies import run as study
from grpojax.training.run import fit

MISTAKES = {
  "compare": [
    ("arms=advantage=grpo", "two or more"),
    ("arms=advantage=grpo, advantage=grpo", "all different"),
    ("arms=advantage=grpo, advantag=grpo", "arm 'advantag=grpo.*did you mean"),
    ("arms=seed=1, advantage=grpo", "remove seed, which the study sets"),
    (
      "arms=group_size=8, group_size=4",
      "1536 completions per run .*, but 3072 and 256 for the first",
    ),
    ("arms=model.path=nowhere, advantage=grpo", "nowhere': no model at"),
    (
      "arms=reward.functions=no.py:f, reward.functions=no.py:f batch_size=16",
      "there is no file .*no.py",
    ),
    ("learning_rates=(1e-4, 1e999)", "finite numbers above 0"),
    ("learning_rates=(1e-4, 0.0001)", "all different"),
    ("train.steps=0", "0 completions per run"),
    ("arms=advantage=grpo, filter_groups.enable=True", "at equal samples"),
    ("arms=advantage=grpo, stop.no_improvement=2", "at equal samples"),
    ("arms=advantage=grpo, eval.every=6", "'eval.every=6': set eval.every"),
    (
      "arms=difficulty.priority=none, difficulty.priority=spread",
      "arm 'difficulty.priority=spread': .*give a single rate",
    ),
    (f"train.seed={2**32 - 1}", "seed = 4294967301"),
  ],
  "group_size": [
    ("budgets=(100,)", "8 must divide the budget 100"),
    ("group_sizes=(1,)", "2 or more"),
    ("predict.prompts=90", "multiple of predict.batch"),
    ("train.optim.learning_rate=-1", "train.optim.learning_rate"),
    ("name=../../x", "names a directory"),
  ],
  "mse": [
    ("samples=96", "samples = 96: must be a multiple of 64"),
    ("samples=128", "192 or more"),
    ("group_sizes=()", "whole numbers of 2 or more"),
    ("group_sizes=(3,4)", "must be different divisors"),
    ("instruct=nowhere", "instruct = 'nowhere': no model at 'nowhere'"),
    (
      "problems=questions; num_prompts=66; shots=71; projections=2",
      r"projections = 2(.|\n)*num_prompts = 66(.|\n)*shots = 71",
    ),
  ],
  "suboptimality": [
    ("steps=(5,5)", r"steps = \(5, 5\): must be increasing"),
    ("group_sizes=(1,2)", "group_sizes = .*2 or more"),
    ("group_sizes=(2.0,)", "whole numbers"),
    ("num_samples=18", r"num_samples = 18: .*not of \[4, 8, 16\]"),
  ],
}


@pytest.mark.parametrize(
  "name, words, message",
  [(name, *row) for name, table in MISTAKES.items() for row in table],
)
def test_mistakes_are_refused_without_writing_files(
  name, words, message, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  program = importlib.import_module(f"grpojax.studies.{name}")
  with pytest.raises(SystemExit) as caught:
    program.main([f"--config.{word}" for word in words.split("; ")])
  assert re.match(f"error: (.|\n)*{message}", caught.value.code)
  assert not list(tmp_path.iterdir())


def open_at(directory, *words):
  argv = [f"--run_dir={directory}", *words]
  study.open_study(argv, group_size.SETTINGS, lambda config: [], "")


@pytest.mark.parametrize(
  "name, text",
  [
    ("file", "file is a file"),
    ("file/x", "file/x: Not a directory"),
    ("x" * 300, "name too long"),
    ("odd", "odd/config.json is not a study's config: .*Is a directory"),
    ("thesis", "is not empty and holds no study"),
    ("study", "another config(.|\n)*seeds: 3 -> 4"),
    ("gs://bucket/study", "is not a path of the file"),
  ],
)
def test_unusable_directories_are_refused(name, text, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").touch()
  (tmp_path / "odd" / "config.json").mkdir(parents=True)
  (tmp_path / "thesis" / "chapter").mkdir(parents=True)
  open_at("study")
  before = (tmp_path / "study" / "config.json").read_bytes()
  with pytest.raises(SystemExit, match=f"^error: .*{text}"):
    open_at(name, "--config.seeds=4")
  assert (tmp_path / "study" / "config.json").read_bytes() == before
  assert len(list(tmp_path.iterdir())) == 4


def run_of(arm):
  return compare.train_settings(to_config(compare.SETTINGS), arm, 1e-4, 0)


@pytest.fixture
def finished_run(tmp_path, made_up):
  """A study's directory with a finished run, and the run's settings."""
  settings = run_of(0)
  made_up(settings, tmp_path / "runs" / settings.name, [0.1, 0.2], 0.2)
  return tmp_path, settings


def test_run_metrics(finished_run):
  directory, settings = finished_run
  file = directory / "runs" / settings.name / "metrics.jsonl"
  rows = '{"step": 0, "accuracy": 0.9}\n{"step": 1, "accuracy": 0.4}\n'
  file.write_text(rows + file.read_text().replace("0.1}", "null}"))
  rows = study.run_metrics(directory, settings.name)
  assert study.run_means(rows, "reward_mean", [{}]) == pytest.approx(0.2)
  # The accuracy before training does not count.
  assert study.run_means(rows, "accuracy", [{}]) == pytest.approx(0.3)
  file.write_text('{"step": 1, "reward_mean": 1.0}\n')
  with pytest.raises(
    SystemExit, match=rf"^error: .*{file.name} .*delete .*{settings.name} and"
  ):
    study.run_metrics(directory, settings.name)


def test_run_with_another_config_is_refused(finished_run, monkeypatch):
  directory, settings = finished_run
  monkeypatch.setattr(fit, "run", lambda *args: pytest.fail("it trains"))
  study.train_all([settings], directory)  # finished
  other = dataclasses.replace(settings, seed=settings.seed + 1)
  with pytest.raises(SystemExit, match="another config"):
    study.train_all([run_of(1), other], directory)


@pytest.mark.parametrize("code, shown", [(130, True), ("x", False)])
def test_stopped_run_prints_a_hint(code, shown, tmp_path, monkeypatch, capsys):
  def stopped(settings, directory):
    print("in the log")
    raise SystemExit(code)

  monkeypatch.setattr(fit, "run", stopped)
  with pytest.raises(SystemExit):
    study.train_all([run_of(0)], tmp_path)
  out = capsys.readouterr().out
  assert "in the log" not in out
  assert (f"{run_of(0).name} was stopped; the same command" in out) == shown
