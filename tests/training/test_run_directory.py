"""Whose a run directory is, and what its config says."""

import jax.numpy as jnp
import pytest

from grpojax.models import hf
from grpojax.runtime import checkpoint, records
from grpojax.runtime import config as config_lib
from grpojax.training import policy, run_directory
from grpojax.training.config import default_config, validate


@pytest.mark.parametrize("trace", ["checkpoints/5", "model", "summary.json"])
def test_open_run(trace, tmp_path):
  run, config = tmp_path / "runs" / "x", default_config()
  assert run_directory.open_run(run, config) is False
  assert run_directory.open_run(run, config) is True
  (run / trace).mkdir(parents=True)
  before = config.optim.learning_rate
  config.optim.learning_rate = 0.5
  with pytest.raises(ValueError) as error:
    run_directory.open_run(run, config)
  assert f"optim.learning_rate: {before} -> 0.5" in str(error.value)
  model = tmp_path / "model"
  model.mkdir()
  (model / "config.json").write_text('{"model_type": "llama"}')
  with pytest.raises(ValueError, match="no config.json of a run"):
    run_directory.open_run(model, config)
  assert (model / "config.json").read_text() == '{"model_type": "llama"}'
  stranger = tmp_path / "stranger"
  stranger.mkdir()
  (stranger / "notes.txt").touch()
  with pytest.raises(ValueError, match="not empty"):
    run_directory.open_run(stranger, config)
  with pytest.raises(ValueError, match="is a file"):
    run_directory.open_run(stranger / "notes.txt", config)
  assert [p.name for p in stranger.iterdir()] == ["notes.txt"]


def test_a_run_without_a_checkpoint_takes_a_corrected_config(tmp_path):
  config = default_config()
  run_directory.open_run(tmp_path, config)
  checkpoint.save_params(tmp_path / "reference", {"a": jnp.zeros(3)})
  config.model.path = "arithmetic-base"
  # An evaluation is no training.
  records.append_jsonl(tmp_path / "metrics.jsonl", {"step": 0})
  assert run_directory.open_run(tmp_path, config) is False
  assert not (tmp_path / "reference").exists()  # it was another model's
  assert run_directory.open_run(tmp_path, config) is True
  records.append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
  config.steps += 1
  with pytest.raises(ValueError, match="another config"):
    run_directory.open_run(tmp_path, config)


def test_open_run_after_a_kill_at_the_very_start(tmp_path):
  (tmp_path / f".{run_directory.CONFIG}.tmp").write_text("{")
  assert run_directory.open_run(tmp_path, default_config()) is False
  assert run_directory.open_run(tmp_path, default_config()) is True


def test_a_setting_of_today_costs_an_older_run_nothing(tmp_path, capsys):
  config = default_config()
  run_directory.open_run(tmp_path, config)
  (tmp_path / "model").mkdir()  # it has trained
  old = config_lib.flatten(config)
  assert old.pop("loss.dual_clip") == 0.0 and old.pop("lora.rank") == 0
  saved = {}
  for name, value in old.items():
    section = saved
    *parents, last = name.split(".")
    for parent in parents:
      section = section.setdefault(parent, {})
    section[last] = value
  records.write_json(tmp_path / "config.json", saved)
  capsys.readouterr()
  found = run_directory.read_config(tmp_path)
  said = capsys.readouterr().out
  assert "loss.dual_clip = 0.0" in said and "lora.rank = 0" in said
  assert "loss.clip_low" not in said
  validate(found)
  assert config_lib.difference(found, config) == []
  assert run_directory.open_run(tmp_path, config) is True
  with config.unlocked():
    config.loss.dual_clip = 3.0  # the old run had it off
  with pytest.raises(ValueError, match="loss.dual_clip: 0.0 -> 3.0"):
    run_directory.open_run(tmp_path, config)


def test_a_run_is_resolved_to_its_model(tmp_path):
  (tmp_path / "config.json").write_text('{"name": "arithmetic"}')
  with pytest.raises(ValueError, match="no model at"):
    policy.find_model(tmp_path)
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
  assert policy.find_model(tmp_path) == tmp_path / "model"
  with pytest.raises(ValueError, match="no model at"):
    hf.resolve(tmp_path)  # which knows nothing of runs
  with pytest.raises(ValueError, match="lacks 'num_attention_heads'"):
    hf.to_transformer_config(hf.read_config(policy.find_model(tmp_path)))
