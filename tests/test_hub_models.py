"""Programs with models of the Hub equal runs from a directory."""

import json
import pathlib

import hub_server
import jax
import numpy as np
import pytest
from run_helpers import assert_same_weights, rows_of, untimed

from grpojax import export, train
from grpojax.training.run import run_models

pytestmark = pytest.mark.slow
ID = "org/tiny"
TOKEN = "hf_" + "s3cret" * 5
LATER = "b" * 40


@pytest.fixture
def served(toy_model, tmp_path, monkeypatch):
  """A private model."""
  server = hub_server.Hub()
  server.add(ID, hub_server.of_directory(toy_model))
  server.tokens[ID] = TOKEN
  with hub_server.client_of(server, tmp_path / "cache", monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server


def rows(run):
  return untimed(rows_of(pathlib.Path(run)))


def test_a_run_from_the_hub_is_pinned_and_equals_one_from_a_directory(
  toy_task, toy_model, served, tmp_path, capsys
):
  settings = {"lora.rank": 2, "loss.beta": 0.1, "eval.every": 9}
  settings |= {"lora.alpha": 3.0}
  words = toy_task.arguments(ID, steps=2, **settings)
  train.main([*words, "--run_dir=a"])
  config = json.loads(pathlib.Path("a/config.json").read_text())
  assert config["model"]["path"] == ID and config["model"]["revision"] == ""
  assert config["commits"] == [f"model:{ID}@main={hub_server.COMMIT}"]
  served.add(ID, {"config.json": b"{}"}, LATER)  # a later commit
  more = toy_task.arguments(ID, steps=3, **settings)
  train.main([*more, "--run_dir=a"])
  local = toy_task.arguments(toy_model, steps=3, **settings)
  train.main([*local, "--run_dir=b"])
  assert rows("a") == rows("b") and len(rows("a")) == 3
  assert_same_weights("a/model", "b/model")
  before = len(served.log)
  train.main([*more, "--run_dir=a"])
  assert len(served.log) == before and "is finished" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="model.revision: '' -> 'main'"):
    train.main([*more, "--config.model.revision=main", "--run_dir=a"])
  _, trained_ = run_models.load("a")  # loads the base at the run's commit
  jax.tree.map(np.testing.assert_array_equal, trained_, run_models.load("b")[1])
  export.main(["a", "--out=exported", "--step=3"])
  assert_same_weights("exported", "a/model")
  export.main(["a", "--out=adapter", "--adapter"])
  adapter = json.loads(pathlib.Path("adapter/adapter_config.json").read_text())
  assert adapter["base_model_name_or_path"] == ID
  assert adapter["revision"] == hub_server.COMMIT
  assert (adapter["lora_alpha"], adapter["r"]) == (3, 2)
  files = [p for p in tmp_path.rglob("*") if p.is_file()]
  assert len(files) > 30 and TOKEN in served.seen
  assert not [p for p in files if TOKEN.encode() in p.read_bytes()]
  with pytest.raises(SystemExit, match="no model at 'org/tiny@bbb"):
    train.main([*more, "--run_dir=c"])
  assert not pathlib.Path("c").exists()
