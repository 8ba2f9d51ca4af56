"""The program `train`: files, options, errors."""

import functools
import json
import math
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from run_helpers import ROOT, python, refusal, rows_of

from grpojax import evaluate, export, train
from grpojax.data import arithmetic, datasets
from grpojax.models import huggingface as hf
from grpojax.rewards import exact
from grpojax.runtime.cli import configs
from grpojax.runtime.files import records
from grpojax.training.run import fit
from grpojax.training.step import sampling
from grpojax.training.step.extensions import group_size

FILES = set(
  "config.json lengths.npz metrics.jsonl samples.jsonl rewards.jsonl "
  "evaluations.jsonl tensorboard checkpoints model report.html "
  "summary.json".split()
)
MEASURED = set(
  "reward_mean reward_std zero_variance_groups completion_length_mean "
  "completion_length_max truncated loss entropy clip_fraction_low "
  "clip_fraction_high ratio_min ratio_max rollout_mismatch_mean "
  "rollout_mismatch_max rollout_clip_fraction_low rollout_clip_fraction_high "
  "grad_norm update_norm skipped_updates".split()
)
DIAGNOSED = set(
  "c1 c1_se c2 c2_se c3 c3_se gradient_sq gradient_snr seconds_diagnosis "
  "gradient_mse gradient_mse_vanilla gradient_mse_oracle".split()
)
BEST = {f"optimal_group_size{end}" for end in ("", "_low", "_high")}
TIMES = set(
  "seconds_step seconds_rollout seconds_rewards seconds_reference "
  "seconds_update tokens_per_second train_seconds".split()
)


def test_a_run_writes_the_documented_files(toy_run):
  run = toy_run.directory
  assert {path.name for path in run.iterdir()} == FILES
  assert all(name in train.__doc__ for name in FILES)
  config = configs.from_json((run / "config.json").read_text())
  assert config.optim.learning_rate == 1e-2 and config.steps == 8
  samples = records.read_jsonl(run / "samples.jsonl")
  assert {row["step"] for row in samples} == {2, 4, 6, 8}
  sizes = {row["step"]: row["group_size"] for row in rows_of(run)}
  for step in (2, 4, 6, 8):  # four groups each
    assert sum(row["step"] == step for row in samples) == 4 * sizes[step]
  for row in samples:
    right = exact.exact_answer("", row["completion"], row)
    assert row["reward"] == right and row["prompt"].endswith("\n")


def test_reward_counts_and_answers_agree_with_metrics(toy_run):
  run = toy_run.directory
  steps = {row["step"]: row for row in rows_of(run)}
  counts = records.read_jsonl(run / "rewards.jsonl")
  assert [row["step"] for row in counts] == list(steps)
  for row in counts:
    values, times = np.array(row["counts"]).T
    assert times.sum() == 64
    mean = steps[row["step"]]["reward_mean"]
    assert values @ times / 64 == pytest.approx(mean, abs=1e-5)
  answers = records.read_jsonl(run / "evaluations.jsonl")
  tests = rows_of(run, "accuracy")
  assert len({row["problems"] for row in answers}) == 1
  for row, test in zip(answers, tests, strict=True):
    assert row["step"] == test["step"] and len(row["right"]) == 10
    assert row["right"].count("1") / 10 == pytest.approx(test["accuracy"])


def test_the_report_shows_the_finished_run(toy_run):
  text = (toy_run.directory / "report.html").read_text()
  data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
  (run,) = json.loads(data)["runs"]
  assert run["status"] == "finished, 8 of 8 steps"
  assert run["notes"] == [] and len(run["groups"]) == 16
  assert "held-out accuracy 0.0% before, 100.0% after" in run["verdict"]["text"]
  for before, after in run["heldOut"]["pairs"]:
    assert before["prompt"] == after["prompt"]
    assert (before["reward"], after["reward"]) == (0, 1)


def test_the_summary_has_the_first_and_last_evaluation(toy_run):
  summary = json.loads((toy_run.directory / "summary.json").read_text())
  tests = rows_of(toy_run.directory, "accuracy")
  assert [row["step"] for row in tests] == [0, 3, 6, 8]
  for when, row in (("before", tests[0]), ("after", tests[-1])):
    interval = [row["accuracy_low"], row["accuracy_high"]]
    assert summary[f"accuracy_{when}"] == row["accuracy"]
    assert summary[f"accuracy_{when}_interval"] == interval
    assert interval[0] <= row["accuracy"] <= interval[1]
  assert summary["accuracy_before"] == 0.0
  assert summary["accuracy_after"] == 1.0  # it learned
  assert summary["steps"] == 8 and summary["train_seconds"] > 0
  rows = records.read_jsonl(toy_run.directory / "metrics.jsonl")
  steps = sum(row.get("seconds_step", 0) for row in rows)
  assert summary["train_seconds"] >= steps
  assert "accuracy before   0.0%" in toy_run.output
  assert "accuracy after  100.0%" in toy_run.output
  assert str(pathlib.Path("runs/toy")) in toy_run.output


def test_every_step_has_a_row_of_metrics(toy_run):
  steps = rows_of(toy_run.directory)
  assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
  for row in steps:
    assert row.keys() >= MEASURED | TIMES
    assert "kl" not in row  # without a reference
    diagnosed = row["step"] in (2, 5, 8)
    assert len(DIAGNOSED & row.keys()) == diagnosed * len(DIAGNOSED)
    assert len(BEST & row.keys()) in (0, diagnosed * len(BEST))
    for name in BEST:  # may be null for infinity
      row.pop(name, None)
    assert all(math.isfinite(value) for value in row.values()), row
    assert 0 < row["completion_length_mean"] <= row["completion_length_max"]
    assert row["completion_length_max"] <= 8 and row["tokens_per_second"] > 0
  assert max(row["grad_norm"] for row in steps) > 0
  parts = ("seconds_rollout", "seconds_rewards", "seconds_update")
  row = steps[-1]
  assert sum(row[part] for part in parts) <= row["seconds_step"]


def test_a_finished_run_is_left_alone(toy_run, toy_task, monkeypatch, capsys):
  monkeypatch.chdir(toy_run.home)

  def snapshot():
    return {
      path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
      for path in toy_run.directory.rglob("*")
    }

  before = snapshot()
  train.main(toy_run.argv)
  assert "is finished" in capsys.readouterr().out
  assert snapshot() == before


REFUSED = {
  "--config={root}/configs/arithmetics.py": "configs/arithmetic.py?",
  "--config.model.path=arithmetic-bose": "no model at",
}
REFUSED_LATER = {  # a second each
  "--config.mesh.fsdp=3": "mesh data=-1 fsdp=3",
  "--config.data.options.difficulty=(4,2)": "difficulty",
  f"--config.seed={2**32}": "seed = 4294967296: must be 0 or more, and less",
  "--config.sampling.max_new_tokens=1000000000": "decode cache",
  "--config.sampling.max_new_tokens=1020": "exceed the 1024 positions",
  "--config.batch_size=100000000": "Change --config.batch_size, --config.g",
  "--config.eval.batch_size=1000000000": "Change --config.eval.batch_size",
  "--config.eval.num_prompts=1000000000": "1000000000: must be 1 to 100000",
  "--run_dir=file/x": "cannot be written: Not a directory",
  "--run_dir=/proc/x": "/proc/x cannot be written: No such file",
}


@pytest.mark.parametrize(
  "word",
  [*REFUSED, *(pytest.param(x, marks=pytest.mark.slow) for x in REFUSED_LATER)],
)
def test_an_error_leaves_no_run_directory(
  word, toy, toy_model, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("file").touch()
  with toy.task(), monkeypatch.context() as patch:
    if "options" in word or "num_prompts" in word:
      patch.setitem(datasets.DATASETS, "arithmetic", arithmetic.load)
    patch.setattr(fit, "fit", None)
    small = [] if "num_prompts" in word else toy.arguments(toy_model)
    message = refusal(train, *small, word.format(root=ROOT))
  assert (REFUSED | REFUSED_LATER)[word] in message
  assert word not in REFUSED or "\n" not in message
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_rewards_on_the_device_give_the_same_run(
  toy_task, toy_model, tmp_path, monkeypatch
):
  # Sampling in halves rounds differently.
  monkeypatch.setattr(sampling, "LARGEST_HALVED", 0)
  final = []
  for on_device in (False, True):
    run = tmp_path / str(on_device)
    changes = {"reward.on_device": on_device, "steps": 2, "eval.every": 2}
    changes |= {"loss.beta": 1.0, "loss.kl": "k1"}
    changes |= {"loss.kl_placement": "reward"}
    changes |= {"diagnostics.every": 1, "diagnostics.last_layers": 1}
    # Adam amplifies rounding errors of small gradients.
    changes |= {"optim.learning_rate": 1e-3, "optim.b2": 0.999}
    train.main([*toy_task.arguments(toy_model, **changes), f"--run_dir={run}"])
    final.append((hf.load_params(run / "model"), rows_of(run)))
  (host, host_rows), (device, device_rows) = final
  close = functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=0)
  jax.tree.map(close, device, host)
  for ours, theirs in zip(host_rows, device_rows, strict=True):
    assert ours["reward_mean"] == theirs["reward_mean"]
  assert 0 < host_rows[0]["reward_mean"] < 1


@pytest.mark.slow
def test_each_group_size_compiles_once(
  toy_task, toy_model, tmp_path, monkeypatch, caplog
):
  """The group size alternates at a constant number of samples."""

  def other(choice, *estimates, **options):
    return choice.replace(group_size=24 - choice.group_size)

  monkeypatch.setattr(group_size.group_size, "observe", other)
  changes = {"steps": 5, "eval.every": 5, "eval.num_prompts": 4}
  changes |= {"group_size": "auto", "auto_group_size.largest": 16}
  changes |= {"diagnostics.every": 1, "optim.micro_batches": 2}
  changes |= {"optim.packing": False}  # rows of each shape compile once
  run = tmp_path / "run"
  with jax.log_compiles():
    train.main([*toy_task.arguments(toy_model, **changes), f"--run_dir={run}"])
  rows = rows_of(run)
  assert [row["group_size"] for row in rows] == [8, 8, 16, 8, 16]
  samples = records.read_jsonl(run / "samples.jsonl")
  assert len(samples) == 4 * (8 + 8)  # steps 2 and 4
  text = [record.getMessage() for record in caplog.records]
  for name, times in (
    *(("update", 2), ("diagnose", 2), ("other", 1)),
    ("sample", 3),  # two sizes and the evaluations
  ):
    compiled = [x for x in text if f"Compiling jit({name})" in x]
    assert len(compiled) == times, name


@pytest.mark.slow
@pytest.mark.parametrize(
  "before, after, text",
  [
    (r".+", "[[1], [2]]", "no run at"),
    (r'"steps": 8', '"steps": {"a": 1}', "steps.a = 1: unknown key"),
    (r'"steps": 8', '"steps": NaN', "steps = nan: must be of type int"),
    (r'"schedule": "\w+"', '"schedule": "x"', "optim.schedule = 'x'"),
  ],
)
def test_a_damaged_config_is_reported_without_traceback(
  before, after, text, toy_run, toy_task, tmp_path
):
  run = shutil.copytree(toy_run.directory, tmp_path / "run")
  (run / "summary.json").unlink()
  config = (run / "config.json").read_text()
  config = re.sub(before, after, config, flags=re.DOTALL)
  (run / "config.json").write_text(config)
  assert "config" in refusal(train, *toy_run.argv, f"--run_dir={run}")
  assert text in refusal(evaluate, f"--model={run}")
  assert text in refusal(export, str(run), f"--out={tmp_path}/out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  "program, statement, code, err",
  [
    ("train", "raise KeyboardInterrupt", 130, "^interrupted\n$"),
    ("studies.group_size", "raise KeyboardInterrupt", 130, "^interrupted\n$"),
    ("train", "1 / 0", 1, "Traceback(.|\n)*ZeroDivisionError"),
  ],
)
def test_errors_during_imports(program, statement, code, err, tmp_path):
  for library in ("jax", "ml_collections"):
    (tmp_path / f"{library}.py").write_text(statement)
  path = f"{tmp_path}:{ROOT}"
  done = python("-m", f"grpojax.{program}", PYTHONPATH=path)
  assert done.returncode == code and re.search(err, done.stderr)
