"""model.ignore_keys: unknown keys of config.json that the user ignores."""

import json
import shutil
import types

import pytest
from run_helpers import assert_same_weights

from grpojax import chat, evaluate, export, sft
from grpojax.aot import programs
from grpojax.models import huggingface as hf
from grpojax.runtime.cli.settings import to_config
from grpojax.training.files.sources import files_of
from grpojax.training.run import setup
from grpojax.training.step import scoring

NAMED = "config.json has note=7, unknown for .*--config.model.ignore_keys=note"


@pytest.fixture(scope="module")
def models(toy_model, classifier, tmp_path_factory):
  """The toy model and a reward model, each with an unknown key."""
  folder = tmp_path_factory.mktemp("models")
  noted = shutil.copytree(toy_model, folder / "noted")
  judge = shutil.copytree(classifier, folder / "judge")
  for path in (noted, judge):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"note": 7}))
  return types.SimpleNamespace(toy=toy_model, noted=noted, judge=judge)


def open_policies(settings):
  policy = setup.with_teacher(settings, setup.open_policy(settings))
  return setup.with_weights(settings, policy)


def open_run(settings):
  mesh = setup.make_mesh(settings)
  if settings.reward.model:
    judge = files_of(settings, settings.reward.model)
    scoring.open_model(settings, judge, mesh)
  return programs.open_run(settings, mesh)


@pytest.mark.parametrize(
  "read, name",
  [
    (open_policies, "model__path"),
    (open_policies, "model__teacher"),
    (open_run, "model__path"),
    (open_run, "model__teacher"),
    (open_run, "reward__model"),
  ],
)
def test_every_model_of_the_settings_ignores_keys(
  read, name, models, settings_with
):
  model = models.judge if name == "reward__model" else models.noted
  changes = {"model__path": str(models.toy), "loss__beta": 1.0}
  changes |= {name: str(model)}
  with pytest.raises(ValueError, match=NAMED):
    read(settings_with(**changes))
  assert read(settings_with(**changes, model__ignore_keys=("note",)))


def test_an_exported_model_lacks_ignored_keys(models, tmp_path):
  words = [str(models.noted), f"--out={tmp_path / 'out'}"]
  with pytest.raises(SystemExit, match=NAMED):
    export.main(words)
  export.main([*words, "--ignore_keys=note,absent"])
  assert "note" not in hf.read_config(tmp_path / "out")
  hf.load_params(tmp_path / "out")


def test_fine_tuning_ignores_keys(models, tmp_path):
  config = to_config(sft.SETTINGS)
  config.model.path = str(models.noted)
  with pytest.raises(ValueError, match=NAMED):
    sft.start(config, tmp_path)
  config.model.ignore_keys = ("note",)
  assert sft.start(config, tmp_path)


@pytest.mark.slow
def test_a_lora_run_can_be_resumed_evaluated_and_exported(
  models, train_toy, tmp_path, capsys
):
  ignored = {"model.path": models.noted, "model.ignore_keys": "note"}
  settings = ignored | {"lora.rank": 2, "model.teacher": models.noted}
  settings |= {"loss.beta": 1.0, "eval.every": 9, "reward.model": models.judge}
  train_toy(steps=1, **settings)
  train_toy(steps=2, **settings)
  assert "resuming after step 1" in capsys.readouterr().out
  run = tmp_path / "run"
  hf.load_params(run / "model")
  evaluate.main([str(run), f"--compare={run / 'model'}"])
  typed = ["--config.model.ignore_keys=note", "--config.eval.num_prompts=2"]
  evaluate.main([str(models.noted), *typed, "--config.data.options.size=2"])
  chat.main([f"--model={run}", "--prompt=1+2"])
  chat.main([f"--model={models.noted}", "--prompt=1+2", typed[0]])
  export.main([str(run), f"--out={tmp_path / 'merged'}"])
  export.main([str(run), f"--out={tmp_path / 'adapter'}", "--adapter"])
  assert_same_weights(tmp_path / "merged", run / "model")
