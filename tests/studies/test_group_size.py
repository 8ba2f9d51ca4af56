"""The study of group sizes: runs, tables and a small whole study."""

import json
import runpy

import numpy as np
import pytest
from numpy.testing import assert_allclose
from run_helpers import ROOT

from grpojax.runtime.cli.settings import to_config
from grpojax.studies import group_size
from grpojax.studies import run as study
from grpojax.training.run import fit


def runs(config):
  """All runs of a study with their group sizes."""
  for seed, budget, size in group_size._points(config):
    run = group_size.train_settings(config, budget, size, seed)
    first = run.auto_group_size.start if size == "auto" else size
    assert run.seed == seed and run.batch_size * first == budget
    yield run, size


@pytest.mark.slow
def test_every_run_spends_the_same_samples():
  """In the default config and in the paper's."""
  paper = runpy.run_path(str(ROOT / "configs/figure5.py"))["get_config"]()
  assert paper.budgets == (1024,)
  assert paper.group_sizes == (4, 8, 16, 32, 64, 128)
  for config, count in (
    (to_config(group_size.SETTINGS), 3 * 2 * 7),
    (paper, 5 * 7),
  ):
    points = list(runs(config))
    assert len({run.name for run, _ in points}) == count
    for run, size in points:
      assert bool(run.diagnostics.every) == (size == "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
  "train", [None, pytest.param(fit.run, marks=pytest.mark.long)]
)
def test_small_study_resumes_after_an_interruption(
  train, small, tmp_path, run_interrupted, made_up, capsys, rows_of
):
  """Four runs of two steps on the toy task."""
  directory = tmp_path / "study"
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
  # None keeps the study's value; each run finds the length of its prompts.
  names = ("batch_size", "group_size", "data.max_prompt_length")
  settings |= {f"train.{name}": None for name in names}
  argv = [*small(settings), f"--run_dir={directory}"]

  def write(settings, directory):
    rewards = [0.1 + 0.01 * settings.seed, 0.2 + 0.01 * settings.seed]
    columns = {"group_size": 8, "c1": 1.0, "c3": 4.0}
    return made_up(settings, directory, rewards, 0.5, **columns)

  assert len(run_interrupted(group_size.main, argv, train or write)) == 3 + 2
  assert (directory / "group_size.png").read_bytes().startswith(b"\x89PNG")
  results, curves = (
    rows_of(directory / f"{name}.csv") for name in ("results", "curves")
  )
  assert [r["budget"] + r["run"] for r in results] == ["648", "64auto"]
  fixed = [r for r in curves if r["run"] == "8"]
  assert [r["seed"] + r["step"] for r in fixed] == ["01", "02", "11", "12"]
  mean = np.mean([float(r["reward"]) for r in fixed])
  assert_allclose(float(results[0]["reward"]), mean, rtol=1e-5)
  summary = json.loads((directory / "summary.json").read_text())
  measured = summary["measured"]["64"]
  assert measured["best_group_size"] == measured["worst_group_size"] == 8
  assert measured["best_minus_worst"] == [0, 0, 0]
  if not train:
    assert summary["along_training"] == {"64": 3.0}  # 1 + sqrt(4 / 1)
  assert "tables and picture" in capsys.readouterr().out


@pytest.mark.slow
def test_automatic_run_without_a_diagnosis(tmp_path, made_up):
  """Too few prompts with rewards: nan at every diagnosis, null in the file."""
  config = to_config(group_size.SETTINGS)
  config.seeds = 2
  config.budgets = (64,)
  config.group_sizes = (8,)
  config.train.auto_group_size.start = 8
  for run, _ in runs(config):
    path = tmp_path / "runs" / run.name
    made_up(run, path, [0.1, 0.2], 0.5, group_size=8, c1=None, c3=None)
  unknown = {f"optimal_group_size{x}": None for x in ("", "_low", "_high")}
  (tmp_path / "prediction.json").write_text(json.dumps(unknown))
  results = group_size.compute(config, tmp_path)
  study._write(results, tmp_path, "group_size")
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["along_training"] == {"64": None}
  assert "G* along training nan" in results.lines[-1]


def test_best_and_worst_are_compared_by_seed():
  rewards = {
    "4": [0.1, 0.3, 0.2],
    "8": [0.4, 0.6, 0.5],
    "16": [0.3, 0.3, 0.3],
    "auto": [0.5, 0.6, 0.4],
  }
  lines = [
    {"budget": 64, "run": run, "reward": np.mean(x), "rewards": x}
    for run, x in rewards.items()
  ]
  config = to_config(group_size.SETTINGS)
  config.budgets = (64,)
  compared = group_size.compare(config, lines)["64"]
  assert (compared["best_group_size"], compared["worst_group_size"]) == (8, 4)
  assert_allclose(compared["best_minus_worst"], [0.3] * 3, atol=1e-6)
  # Student's interval of the differences 0.1, 0 and -0.1.
  expected = [0, *(x * 4.302653 * 0.1 / np.sqrt(3) for x in (-1, 1))]
  assert_allclose(compared["auto_minus_best"], expected, rtol=1e-4, atol=1e-6)
