"""Runs that are opened, and resumed with other settings or data."""

import contextlib
import errno
import json
import re
import shutil
import tempfile
import time
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from run_helpers import assert_same_weights

from grpojax.runtime.files import records
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import chat_template
from grpojax.training import policies
from grpojax.training.data import splits
from grpojax.training.files.sources import ModelFiles
from grpojax.training.report import run_report
from grpojax.training.run import memory, open_run, start
from grpojax.training.settings.run import Facts
from grpojax.training.step.run import Run


def summary_of(run):
  return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run_without_its_metrics(
  train_short, tmp_path, capsys
):
  run = tmp_path / "run"
  whole = tmp_path / "whole"
  adaptive = {"loss.entropy_target": 9.0, "loss.entropy_coef_delta": 0.01}
  train_short("whole", steps=4, **adaptive)
  train_short(**adaptive)
  # The trained policy would have another accuracy.
  first = summary_of(run)
  assert (first["accuracy_before"], first["steps"]) == (0.0, 2)
  (run / "metrics.jsonl").unlink()
  capsys.readouterr()
  rows = train_short(steps=4, **adaptive, **{"log.every": 3})
  output = capsys.readouterr().out
  assert "changed: steps: 2 -> 4" in output
  assert "resuming after step 2" in output
  second = summary_of(run)
  for name in ("accuracy_before", "accuracy_before_interval"):
    assert second[name] == first[name]
  assert second["train_seconds"] > first["train_seconds"]
  assert second["steps"] == 4
  assert_same_weights(run / "model", whole / "model")
  # The coefficient continues from its value at step 2.
  name = "entropy_coefficient"
  values = {row["step"]: row[name] for row in rows if name in row}
  assert values[3] == pytest.approx(0.02) and values[4] == pytest.approx(0.03)
  assert min(row["step"] for row in rows) == 2  # no baseline
  # The starting weights are evaluated on new held-out prompts.
  adaptive |= {"eval.num_prompts": 6}
  train_short(steps=5, **adaptive)
  output = capsys.readouterr().out
  assert "held-out greedy accuracy after 0 steps: 0.0%" in output
  assert summary_of(run)["eval_prompts"] == 6


def test_changed_data_are_refused():
  before = {"train": [100, "a"], "test": [6, "b"]}
  assert not open_run._changed_data(before, before)
  assert not open_run._changed_data({}, before)  # an older run
  # Another number of held-out prompts is not compared.
  assert not open_run._changed_data(before, before | {"test": [4, "c"]})
  for split, now in (("train", [100, "c"]), ("test", [6, "c"])):
    (line,) = open_run._changed_data(before, before | {split: now})
    assert re.search(f"{split} split changed.*some differ", line)
  (line,) = open_run._changed_data(before, before | {"train": [99, "c"]})
  assert "100 examples then, 99 now" in line


def test_a_changed_chat_template_is_refused(settings_with, tmp_path):
  policy = types.SimpleNamespace(files=ModelFiles(tmp_path), teacher=None)
  settings = settings_with(model__path="here")
  run = Run(settings, tmp_path, policy, None, None, None)
  hashes = open_run._file_hashes.__wrapped__  # without type checks
  (tmp_path / "chat_template.jinja").write_text("old")
  before = hashes(run)
  assert not open_run._changed_files(before, hashes(run))
  assert not open_run._changed_files({}, before)  # an older run
  (tmp_path / "chat_template.jinja").write_text("other")
  (line,) = open_run._changed_files(before, hashes(run))
  assert line.startswith("here/chat_template.jinja: changed since")


def test_changed_settings_of_jax_are_printed(capsys):
  before = open_run._jax_facts({})
  assert open_run._jax_facts(before) == before
  assert capsys.readouterr().out == ""
  with jax.enable_x64(True):
    open_run._jax_facts(before)
  line = "JAX_ENABLE_X64 was False and is True: numbers differ from here on\n"
  assert capsys.readouterr().out == line


@pytest.mark.slow
def test_adapters_of_changed_weights_are_refused(
  train_short, toy_model, tmp_path
):
  base = tmp_path / "base"
  lora = {"model.path": base, "lora.rank": 2}
  shutil.copytree(toy_model, base)
  before = train_short(steps=1, **lora)
  file = base / "model.safetensors"
  weights = safetensors.numpy.load_file(file)
  name = next(name for name in weights if "q_proj" in name)
  weights[name] = weights[name][::-1].copy()
  safetensors.numpy.save_file(weights, file)
  with pytest.raises(SystemExit, match="changed since this run's adapters"):
    train_short(steps=2, **lora)
  assert records.read_jsonl(tmp_path / "run" / "metrics.jsonl") == before
  shutil.copy(toy_model / "model.safetensors", file)
  train_short(steps=2, **lora)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a step", "before a save"])
def test_a_directory_removed_during_training_ends_the_run(
  when, train_short, tmp_path, monkeypatch
):
  run = tmp_path / "run"
  append = records.append_jsonl

  def append_jsonl(path, row):
    if row.get("step") == 2:
      shutil.rmtree(run)
    append(path, row)

  def before_a_save(_):
    run.rename(tmp_path / "renamed")

  settings = {"steps": 4, "eval.every": 9, "checkpoint.every": 9}
  if when == "before a save":
    monkeypatch.setattr(run_report, "write", before_a_save)
    settings |= {"checkpoint.every": 1, "log.report_every": 1}
  else:
    monkeypatch.setattr(records, "append_jsonl", append_jsonl)
  with pytest.raises(SystemExit) as ended:
    train_short(**settings)
  text = "error: .*/run is gone: it was removed, renamed"
  assert re.match(text, ended.value.code) and not run.exists()


@pytest.mark.slow
def test_a_run_without_rewards_stops_and_can_be_resumed(
  train_short, tmp_path, capsys
):
  run = tmp_path / "run"
  rewards = tmp_path / "rewards.py"
  rewards.write_text("def broken(prompt, completion, example):\n  1 / 0\n")
  settings = {"reward.functions": f"{rewards}:broken", "steps": 9}
  settings |= {"stop.rewards_missing": 2, "checkpoint.every": 5}
  # The rollout of step 3 is saved with step 2, with rewards of the old file.
  settings |= {"sampling.ahead": 1, "loss.correction": "sequence_truncate"}
  text = "^stopped: in 2 steps in a row no completion had a reward.*"
  text += "--config.stop.rewards_missing=0; saved step 2$"
  with pytest.raises(SystemExit, match=text):
    train_short(**settings)
  output = capsys.readouterr().out
  assert "! 100% without reward" in output
  assert "0.0%  [0.0%, 49.0%]  (no reward could be computed" in output
  assert "step 2 of 9" in (run / "report.html").read_text()
  settings |= {"stop.rewards_missing": 0, "steps": 3}
  rewards.write_text(rewards.read_text() + "# other")
  with pytest.raises(SystemExit, match="rewards.py: changed since this run st"):
    train_short(**settings)
  train_short(allow_changed_inputs=True, **settings)
  output = capsys.readouterr().out
  assert "rewards.py: changed since" in output
  assert "resuming after step 2" in output
  assert "discarding the pending rollout" in output
  summary = summary_of(run)
  troubled = {k for k, count in summary["steps_with"].items() if count}
  assert troubled == {"rewards_missing", "zero_variance_groups"}
  assert summary["steps_with"]["rewards_missing"] == 3
  assert summary["failed_rewards"] == 3 * 4 * 8


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_more_steps_of_a_decayed_run_warn(schedule, settings_with, capsys):
  rates = {"optim__schedule": schedule, "optim__learning_rate": 2e-4}
  settings = settings_with(**rates, optim__minibatches=2, steps=80)
  open_run._say_changed(settings, ["log.every: 1 -> 2", "steps: 40 -> 80"], 40)
  lines = capsys.readouterr().out.splitlines()
  assert lines[1] == "changed: steps: 40 -> 80"
  assert len(lines) == 2 + (schedule != "constant")
  if lines[2:]:
    assert "ends after 80 steps instead of 40: after step 40 " in lines[2]
    assert "the learning rate is 0.0001, not 0." in lines[2]


@pytest.mark.parametrize("shown", [False, True])
def test_the_date_is_pinned_if_the_template_uses_it(
  shown, settings_with, tmp_path, monkeypatch
):
  monkeypatch.setattr(chat_template, "asks_for_date", lambda tokenizer: shown)
  inputs = settings_with(steps=1), Facts(), tmp_path
  run = start.read_inputs(*inputs, today="1 May 2031")
  options = {"date_string": "1 May 2031"} if shown else {}
  assert run.settings.data.template_options == options


def test_checks_do_not_wait_for_other_processes(
  settings_with, tmp_path, monkeypatch
):
  """They may fail in one process only."""
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(distributed, "gather", None)
  with contextlib.ExitStack() as stack:
    settings = settings_with(steps=1)
    start.check(settings, Facts(), tmp_path, stack, lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 6])  # of 4 held-out prompts, and training
def test_sigterm_ends_a_run_between_two_rewards(after, train_short, tmp_path):
  rewards = tmp_path / "rewards.py"
  seen = tmp_path / "seen"
  rewards.write_text(
    "import os, signal\n"
    "def slow(prompt, completion, example):\n"
    f"  with open({str(seen)!r}, 'a') as file: file.write('x')\n"
    f"  if os.path.getsize({str(seen)!r}) == {after}:\n"
    "    os.kill(os.getpid(), signal.SIGTERM)\n"
    "  return 1.0\n"
  )
  settings = {"reward.functions": f"{rewards}:slow"}
  with pytest.raises(SystemExit) as caught:
    train_short(**settings)
  assert caught.value.code == 75
  assert seen.stat().st_size == after


def test_waiting_for_a_device_checks_signals():
  answers = iter([False] * 4 + [True])
  times = []
  array = types.SimpleNamespace(is_ready=lambda: next(answers))
  policies.wait([array], lambda: times.append(time.monotonic()))
  assert len(times) == 5 and max(np.diff(times)) < 1


def test_a_directory_must_be_shared_and_writable(tmp_path, monkeypatch):
  monkeypatch.setattr(open_run, "SEEN_WITHIN", 0)
  with pytest.raises(ValueError, match="must be on shared storage"):
    open_run._check_shared(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  open_run._check_shared(tmp_path)

  def refuse(*args, **options):
    raise OSError(errno.EROFS, "Read-only file system")

  monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
  with pytest.raises(ValueError, match="cannot be written: Read-only file"):
    open_run._check_shared(tmp_path)


def refused_at_the_start(settings, directory, text):
  with contextlib.ExitStack() as stack:
    with pytest.raises(SystemExit, match=text):
      open_run.open_all(settings, Facts(), directory, stack, print, print)


def test_processes_with_different_examples_are_refused(
  tmp_path, settings_with, monkeypatch
):
  split = splits.Split([0] * 7, 0, "a")
  settings = settings_with()
  run = Run(settings, tmp_path, None, None, split, split, None)
  monkeypatch.setattr(start, "check", lambda *_: run)
  second = {"the train split": "7 examples\nfingerprint a"}
  second["the test split"] = "7 examples\nfingerprint b"
  monkeypatch.setattr(distributed, "gather", lambda own: [own, second])
  text = "differ in the test split: fingerprint a and fingerprint b"
  refused_at_the_start(settings, tmp_path, text)


def test_process_0_sets_the_date_and_the_limit_of_memory(
  tmp_path, settings_with, monkeypatch
):
  facts = {chat_template.today: "26 Jul 2024", memory.accelerator_bytes: 7}

  def check(*args):
    raise ValueError(f"{args[-2]}, {args[-1]} bytes")

  on_main = lambda function: facts.get(function) or function()
  monkeypatch.setattr(distributed, "on_main", on_main)
  monkeypatch.setattr(start, "check", check)
  refused_at_the_start(settings_with(), tmp_path, "26 Jul 2024, 7 bytes")


def test_edited_code_has_another_checksum(tmp_path):
  (tmp_path / "core").mkdir()
  file = tmp_path / "core" / "step.py"
  file.write_text("x = 1\n")
  before = open_run._code(tmp_path)
  file.write_text("x = 2\n")
  assert before.startswith("core/step.py: ")
  assert open_run._code(tmp_path) not in ("", before)
  assert "training/run/open_run.py: crc32 " in open_run._code()
