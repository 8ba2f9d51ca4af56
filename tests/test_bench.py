"""The program `bench`: errors and output."""

import json

import pytest

from grpojax import bench
from grpojax.benchmarks import configured, side_by_side
from grpojax.training.settings import mixtures

WRONG = {
  "": "give --workload, one of fixed, .* or --config=FILE",
  "--workload=fixed --config=x.py": "has its own config: remove --config",
  "--workload=fixed --config.optim.micro_batches=3": "micro_batches = 3",
  "--config.model.path=no/such/model": "no model at 'no/such/model'",
  "--config.mesh.tensor=999": "999 devices",
  "--config.reward.on_device=True --config.data.max_prompt_length=2": "tokens",
  "--config.reward.on_device=True --config.data.path=no/data "
  "--config.data.max_prompt_length=32": "data.path",
  "--config.seed=1": "max_prompt_length = 0",
}


@pytest.fixture
def measured(monkeypatch):
  """Replaces measurements; returns the arguments of each call."""
  calls = []

  def measure(*args):
    calls.append(args)
    return {"peer": "grpojax"}

  monkeypatch.setattr(side_by_side, "measure", measure)
  monkeypatch.setattr(configured, "measure", measure)
  monkeypatch.setattr(configured, "lines", lambda report: [])
  return calls


@pytest.mark.parametrize("words", WRONG)
def test_errors_are_raised_before_timing(
  words, measured, monkeypatch, tmp_path
):
  if "--config=" in words:
    (tmp_path / "x.py").write_text(
      "from grpojax.training.config import default_config as get_config\n"
    )
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match=f"error: (?s:.*){WRONG[words]}"):
    bench.main(words.split())
  assert not measured


def test_random_prompts_ignore_the_mixture(measured):
  words = "name=arithmetic rewards=exact_answer".split()
  words = [f"--config.data.mixture.sums.{word}" for word in words]
  bench.main(["--config.data.max_prompt_length=32", *words])
  settings = measured[0][0].settings
  assert not mixtures.sources(settings)
  assert mixtures.scored_by(settings) == {}


def test_a_workload_prints_one_json_line(measured, tmp_path, capsys):
  out = tmp_path / "out.json"
  bench.main(["--workload=tail", "--config.model.remat=none", f"--out={out}"])
  bench.main(["--workload=fixed", "--steps=1", "--warmup=3"])
  assert capsys.readouterr().out == '{"peer": "grpojax"}\n' * 2
  assert json.loads(out.read_text()) == {"peer": "grpojax"}
  (tail, settings, *counts), (_, _, *others) = measured
  assert (tail, counts, others) == ("tail", [8, 2], [1, 3])
  assert settings.model.remat == "none" and settings.loss.beta == 0.04


def test_results_survive_a_full_disk(measured, monkeypatch, tmp_path, capsys):
  out = tmp_path / "folder" / "out.json"
  out.parent.mkdir()
  measure = lambda *_: out.parent.rmdir() or {"steps": 3}
  monkeypatch.setattr(side_by_side, "measure", measure)
  with pytest.raises(SystemExit, match="error: .*out.json: No such file"):
    bench.main(["--workload=fixed", f"--out={out}"])
  assert capsys.readouterr().out == '{"steps": 3}\n'
