"""Run directories: which settings may resume a run, and its config file."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from grpojax.runtime import checkpoint
from grpojax.runtime.cli import configs
from grpojax.runtime.files import records
from grpojax.training.config import default_config, from_config
from grpojax.training.files import run_directory
from grpojax.training.run import open_run
from grpojax.training.settings.run import (
  Facts,
  TrainSettings,
  commits_in,
  completed,
)


def opened(path, config=None):
  settings = from_config(config) if config else TrainSettings()
  return run_directory.open_run(path, settings)


def checkpointed(path, step):
  """Makes an empty checkpoint."""
  folder = path / "checkpoints" / str(step)
  folder.mkdir(parents=True)
  (folder / "_CHECKPOINT_METADATA").touch()


def finished(path, steps=40):
  config = default_config()
  config.steps = steps
  config.reward.workers = 1
  opened(path, config)
  checkpointed(path, steps)
  (path / "model").mkdir()
  (path / "checkpoints" / "99").mkdir()  # incomplete
  (path / "summary.json").write_text(json.dumps({"steps": steps}))
  return config


@pytest.mark.parametrize("trace", ["checkpoints/5", "model", "summary.json"])
def test_a_run_that_has_trained_keeps_its_config(trace, tmp_path):
  run = tmp_path / "runs" / "x"
  config = default_config()
  assert opened(run) is False and opened(run) is True
  (run / trace).mkdir(parents=True)
  before = config.optim.learning_rate
  config.optim.learning_rate = 0.5
  with pytest.raises(ValueError, match="another config") as error:
    opened(run, config)
  assert f"optim.learning_rate: {before} -> 0.5" in str(error.value)


def test_a_run_without_a_checkpoint_takes_a_corrected_config(tmp_path):
  config = default_config()
  opened(tmp_path)
  checkpoint.save_params(tmp_path / "reference_params", {"a": jnp.zeros(3)})
  config.model.path = "arithmetic-base"
  # An evaluation is not a training step.
  records.append_jsonl(tmp_path / "metrics.jsonl", {"step": 0})
  assert opened(tmp_path, config) is False
  assert not (tmp_path / "reference_params").exists()  # of another model
  assert opened(tmp_path, config) is True
  records.append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
  config.seed += 1
  with pytest.raises(ValueError, match="another config"):
    opened(tmp_path, config)


NO_CONFIGS = ['{"model_type": "llama"}', '{"model": {"path": "x"}}', "[1]", "{"]
NO_CONFIGS += ["[" * 10**5, '{"model": 3}']


@pytest.mark.parametrize("text", NO_CONFIGS)
def test_other_directories_are_refused_and_left_unchanged(text, tmp_path):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError, match="not empty and has no config.json of a"):
    opened(tmp_path)
  with pytest.raises(ValueError, match="is a file"):
    opened(tmp_path / "config.json")
  with pytest.raises(ValueError, match="no run at"):
    run_directory.read_config(tmp_path)
  assert os.listdir(tmp_path) == ["config.json"]
  assert (tmp_path / "config.json").read_text() == text
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(ValueError, match="config.json cannot be read.*has check"):
    opened(tmp_path)


def test_a_run_killed_during_its_start_can_be_opened(tmp_path, monkeypatch):
  for name in (run_directory.CONFIG, run_directory.LENGTHS):
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as killed:
      killed.setattr(pathlib.Path, "unlink", lambda *_, **__: None)
      with records.replacing(tmp_path / name) as temporary:
        temporary.write_text("{")
        raise KeyboardInterrupt
  assert len(os.listdir(tmp_path)) == 2
  assert opened(tmp_path) is False and opened(tmp_path) is True


def test_temporary_files_of_killed_writers_are_removed(tmp_path):
  torn = [f".{name}.0123abcd.tmp" for name in ("metrics.jsonl", "report.html")]
  others = [".mine.0123abcd.tmp", "metrics.jsonl.tmp", ".metrics.jsonl.x.tmp"]
  for name in torn + others:
    (tmp_path / name).touch()
  run_directory.remove_torn(tmp_path)  # a recent report stays
  assert sorted(os.listdir(tmp_path)) == sorted([torn[1], *others])
  for time in (0, 2**32):  # in the past or the future
    (tmp_path / torn[1]).touch()
    os.utime(tmp_path / torn[1], (time, time))
    run_directory.remove_torn(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_links_to_files_are_replaced_by_copies(tmp_path):
  run = tmp_path / "run"
  others = tmp_path / "others"
  others.mkdir()
  opened(run)
  names = ("config.json", "metrics.jsonl", "changes.jsonl", "report.html")
  (run / "metrics.jsonl").write_text('{"step": 0}\n')
  for name in names[2:]:
    (run / name).write_text(name)
  for name in names:
    (run / name).rename(others / name)
    (run / name).symlink_to(others / name)
  (run / "lengths.npz").symlink_to(others / "missing")
  before = {name: (others / name).read_text() for name in names}
  assert opened(run) is True
  assert sorted(os.listdir(run)) == sorted(names)
  for name in names:
    assert not (run / name).is_symlink()
    (run / name).write_text("new")
    assert (others / name).read_text() == before[name]


def test_a_model_is_removed_whole_or_not_at_all(tmp_path, monkeypatch):
  finished(tmp_path)
  (tmp_path / "model" / "weights").touch()
  with monkeypatch.context() as patch:
    patch.setattr(run_directory.shutil, "rmtree", lambda path, **options: None)
    run_directory.remove_model(tmp_path)  # killed after the renaming
  assert not (tmp_path / "model").exists()
  assert not (tmp_path / "summary.json").exists()
  assert (tmp_path / ".model.old" / "weights").exists()
  run_directory.remove_model(tmp_path, only_rest=True)
  assert not (tmp_path / ".model.old").exists()
  # Links are removed, but not their targets.
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  for target in (elsewhere, tmp_path / "nowhere"):
    (tmp_path / "model").symlink_to(target)
    run_directory.remove_model(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if "model" in name]
  assert elsewhere.is_dir()


def older_run(path, lacks, **changes):
  """Makes a trained run whose config.json lacks these settings."""
  opened(path)
  checkpointed(path, 7)
  saved = default_config().to_dict() | changes
  for name in lacks:
    *parents, last = name.split(".")
    section = saved
    for parent in parents:
      section = section[parent]
    del section[last]
  records.write_json(path / "config.json", saved)


def test_an_older_run_gets_the_defaults_of_added_settings(tmp_path, capsys):
  lacks = ("loss.dual_clip", "lora", "data.options", "reward.options")
  older_run(tmp_path, lacks)
  config = default_config()
  run_directory.say_added(tmp_path)
  output = capsys.readouterr().out
  assert "loss.dual_clip = 0.0" in output and "lora.rank = 0" in output
  assert "data.options = {}" in output and "loss.clip_low" not in output
  read = run_directory.read_config(tmp_path)
  from_config(read)
  assert read.data.options.to_dict() == {} and read.is_locked
  assert configs.difference(read, config) == []
  assert opened(tmp_path, config) is True
  config.loss.dual_clip = 3.0
  with pytest.raises(ValueError, match="loss.dual_clip: 0.0 -> 3.0"):
    opened(tmp_path, config)
  opened(tmp_path / "new", config)
  run_directory.say_added(tmp_path / "new")
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"loss": None}, "loss = None: is a section"),
    ({"lora": []}, "lora = (): is a section"),
    ({"steps": {"a": 1}}, "steps.a = 1: unknown key"),
    ({"group_size": None}, "group_size = None: must be of type int"),
  ],
)
def test_a_config_with_invalid_values_is_refused(changes, text, tmp_path):
  older_run(tmp_path, () if "loss" in changes else ("seed",), **changes)
  with pytest.raises(ValueError) as error:
    run_directory.read_config(tmp_path)
  assert text in str(error.value) and "config.json" in str(error.value)
  with pytest.raises(ValueError, match="another config"):
    run_directory.check(tmp_path, TrainSettings())


CHANGED = {"log.every": 3, "eval.num_prompts": 17, "checkpoint.keep": 5}
CHANGED |= {"stop.truncated": 4, "data.too_long": "drop", "mesh.fsdp": 2}
CHANGED |= {"reward.workers": 2, "reward.timeout": 3.0, "sampling.parts": 2}
CHANGED |= {"optim.micro_batches": 2}
CHANGED |= {"logits_chunk": 32}
NOT_CHANGED = {"optim.learning_rate": 0.5, "data.template": "{prompt}"}
NOT_CHANGED |= {"optim.name": "adafactor", "optim.moments_dtype": "bfloat16"}
NOT_CHANGED |= {"seed": 3, "reward.weights": (2.0,)}


def keys(lines):
  return {line.partition(": ")[0] for line in lines}


def contents(path):
  return {p: p.is_file() and p.read_bytes() for p in path.rglob("*")}


@pytest.mark.parametrize("more_steps", [False, True])
def test_changeable_settings_are_recorded(more_steps, tmp_path):
  config = finished(tmp_path)
  changes = CHANGED | ({"steps": 50} if more_steps else {})
  config.update_from_flattened_dict(changes)
  before = contents(tmp_path)
  assert opened(tmp_path, config) is True
  assert contents(tmp_path) == before  # until `record_changes`
  for _ in range(2):
    run_directory.record_changes(tmp_path, from_config(config))
    saved = run_directory.read_config(tmp_path)
    assert configs.difference(saved, config) == []
    (row,) = records.read_jsonl(tmp_path / "changes.jsonl")
    assert row["after_step"] == 40 and keys(row["changed"]) == changes.keys()
  for trace in ("summary.json", "model"):
    assert (tmp_path / trace).exists() != more_steps


def test_other_settings_may_not_change(tmp_path):
  config = finished(tmp_path)
  for name in ("optim.name", "optim.moments_dtype"):  # which exclude each other
    changes = {k: x for k, x in NOT_CHANGED.items() if k != name}
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(changes | {"steps": 50})
    other = from_config(other)
    may, may_not = run_directory.changed(tmp_path, other)
    assert keys(may) == {"steps"} and keys(may_not) == changes.keys()
    with pytest.raises(ValueError, match="(?s)another config.*seed: 0 -> 3"):
      run_directory.check(tmp_path, other)
  assert (tmp_path / "summary.json").exists()


def test_a_finished_run_without_checkpoints_takes_no_more_steps(tmp_path):
  config = finished(tmp_path)
  shutil.rmtree(tmp_path / "checkpoints" / "40")
  assert opened(tmp_path, config) is True
  config.steps = 50
  with pytest.raises(ValueError, match="no checkpoint to resume from: restore"):
    opened(tmp_path, config)
  shutil.rmtree(tmp_path / "checkpoints")
  (tmp_path / "checkpoints").touch()
  with pytest.raises(ValueError, match="/checkpoints is a file"):
    opened(tmp_path, config)


@pytest.mark.slow
def test_a_run_is_finished_by_its_summary_and_steps(tmp_path):
  config = finished(tmp_path)
  assert run_directory.is_finished(tmp_path, from_config(config))
  config.steps = 39
  with pytest.raises(ValueError, match="has completed 40 steps"):
    run_directory.check(tmp_path, from_config(config))
  config.steps = 41
  assert not run_directory.is_finished(tmp_path, from_config(config))
  assert run_directory.is_finished(tmp_path)
  config.steps = 40
  for text in ("", "{", "[]", "[" * 10**5, '{"steps": null}', "\xff"):
    (tmp_path / "summary.json").write_text(text, encoding="latin-1")
    assert not run_directory.is_finished(tmp_path)
    assert not run_directory.is_finished(tmp_path, from_config(config))
    assert run_directory.check(tmp_path, from_config(config))


def test_values_of_settings_precede_facts(settings_with):
  commit = f"model:a/b@main={'0' * 40}"
  facts = Facts({"model:a/b@main": "1" * 40}, "26 Jul 2024", 300, 64)
  settings = settings_with(data__max_prompt_length=0)
  filled = completed(settings, facts)
  assert filled.commits == (f"model:a/b@main={'1' * 40}",)
  assert filled.data.template_options == {"date_string": "26 Jul 2024"}
  assert filled.data.max_prompt_length == 300
  assert filled.optim.update.chunk_size == 64
  assert completed(settings, Facts()) == settings
  changes = {"commits": (commit,), "logits_chunk": 16}
  changes |= {"data__max_prompt_length": 99}
  options = ConfigDict({"date_string": "27 Jul 2024"})
  chosen = settings_with(**changes, data__template_options=options)
  assert completed(chosen, facts) == chosen


def test_a_resumed_run_keeps_its_date_and_commits(tmp_path, monkeypatch):
  settings = TrainSettings()
  commits = {"model:a/b@main": "0" * 40}
  monkeypatch.setattr(
    open_run.sources, "all_commits", lambda s: commits_in(s.commits)
  )
  assert open_run.settle(settings, tmp_path) == Facts()
  facts = Facts(date="26 Jul 2024", prompt_length=300)
  run_directory.open_run(tmp_path, completed(settings, facts))
  # Before the first step the data may change.
  assert not open_run.settle(settings, tmp_path).prompt_length
  checkpointed(tmp_path, 7)
  assert open_run.settle(settings, tmp_path) == facts
  other = completed(settings, Facts(date="27 Jul 2024"))
  with pytest.raises(ValueError, match="date_string"):
    open_run.settle(other, tmp_path)
  model = dataclasses.replace(settings.model, path="a/b")
  settings = dataclasses.replace(settings, model=model)
  run_directory.open_run(tmp_path / "hub", completed(settings, Facts(commits)))
  assert open_run.settle(settings, tmp_path / "hub") == Facts(commits)
