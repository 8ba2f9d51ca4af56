"""Mixtures of data sets: config, prompts, metrics, evaluation."""

import json
import re

import numpy as np
import pytest
from ml_collections import ConfigDict

from grpojax import evaluate
from grpojax.data.examples import SOURCE
from grpojax.runtime.cli import configs
from grpojax.training import policies
from grpojax.training.config import from_config
from grpojax.training.data import prompts, splits
from grpojax.training.files.sources import find_files
from grpojax.training.settings import mixtures
from grpojax.training.settings.run import TrainSettings


def mixture(**parts):
  return {"data__mixture": ConfigDict(parts)}


def test_a_mixture_is_read_from_the_config(config_with):
  parts = mixture(
    hard={"name": "arithmetic", "options": {"difficulty": (4, 5)}},
    gsm8k={"path": "x", "weight": 3, "rewards": "math_answer, format"},
  )
  functions = "exact_answer", "math_answer", "format"
  rewards = {"reward.functions": functions, "reward.weights": (1.0, 1.0, 0.5)}
  config = config_with(**rewards, **parts)
  settings = from_config(config)
  result = mixtures.sources(settings)
  assert list(result) == ["gsm8k", "hard"]  # sorted
  assert result["gsm8k"].name == "gsm8k" and result["gsm8k"].weight == 3
  assert result["gsm8k"].rewards == ("math_answer", "format")
  assert result["hard"].options == {"difficulty": (4, 5)}
  again = configs.from_json(configs.to_json(config))
  assert mixtures.sources(from_config(again)) == result
  # scored_by omits functions that score all data sets.
  assert mixtures.scored_by(settings) == {"exact_answer": ["hard"]}
  judges = {"gsm8k": "math_answer", "hard": "exact_answer"}
  assert mixtures.judges(settings) == judges
  nothing = TrainSettings()
  assert not mixtures.sources(nothing) and not mixtures.scored_by(nothing)


def test_metrics_by_data_set(settings_with):
  settings = settings_with(**mixture(**dict.fromkeys("abc", {"name": "gsm8k"})))
  examples = [{SOURCE: name} for name in "abab"]
  rewards = np.array([[1, 0], [np.nan, 1], [1, 1], [np.nan, np.nan]])
  assert mixtures.metrics(settings, examples, rewards) == {
    "a/prompts": 2,
    "a/reward_mean": 0.75,
    "a/zero_variance_groups": 0.5,
    "b/prompts": 2,
    "b/reward_mean": 1.0,
    "b/zero_variance_groups": 1.0,
  }
  assert mixtures.metrics(TrainSettings(), examples, rewards) == {}
  alone = mixtures.metrics(settings, examples, rewards[:, :1])
  assert alone["b/zero_variance_groups"] == 0
  none = mixtures.metrics(settings, examples[:1], np.array([[np.nan]]))
  assert none == {"a/prompts": 1, "a/zero_variance_groups": 0}


@pytest.fixture
def files(write_data):
  """Two data sets of prompts of 1 to 12 or 8 characters."""
  parts = {}
  for name, size in (("nines", 12), ("ones", 8)):
    rows = [{"prompt": name[0] * n, "answer": ""} for n in range(1, size + 1)]
    path = write_data(name, train=rows, test=rows)
    parts[name] = {"name": "jsonl", "path": path}
  return mixture(**parts) | {"data__template": "{prompt}"}


def test_long_prompts_of_each_data_set_are_refused_or_dropped(
  files, settings_with
):
  policy = policies.open_policy(find_files("arithmetic-instruct"))
  changes = files | {"data__max_prompt_length": 14}
  settings = settings_with(**changes)
  with pytest.raises(ValueError, match="train nines split: 5 of 12 prompts"):
    splits.load_split(settings, policy, "train")
  # Three held-out prompts of each.
  changes |= {"data__too_long": "drop", "eval__num_prompts": 3}
  settings = settings_with(**changes)
  whole = splits.load_split(settings, policy, "train")
  test = splits.load_split(settings, policy, "test")
  assert whole.dropped == 6 and len(whole.examples) == 14
  assert len(whole.lengths) == 20 and len(test.examples) == 6
  assert {e[SOURCE] for e in test.examples} == {"nines", "ones"}
  batches = prompts.training_batches(settings, policy, whole.examples, 8)
  assert sum(e[SOURCE] == "ones" for e in next(batches)[1]) == 16


def test_an_error_names_its_data_set(files, config_with):
  config = config_with(**files)
  config.data.mixture.ones.path = "/nowhere"
  with pytest.raises(ValueError, match="data.mixture.ones: .*/nowhere"):
    splits.load_examples(from_config(config), "train")


@pytest.mark.slow
def test_a_model_is_evaluated_by_data_set(
  toy_task, toy_model, tmp_path, capsys
):
  """Each data set has its own reward; one is always right, one never."""
  file = tmp_path / "mine.py"
  out = tmp_path / "result.json"
  file.write_text("def easy(prompt, completion, example):\n  return 1.0\n")
  settings = {
    "reward.functions": f"exact_answer,{file}:easy",
    "reward.weights": "1,1",
    "data.mixture.one.name": "arithmetic",
    "data.mixture.one.rewards": "easy",
    "data.mixture.two.name": "arithmetic",
    "data.mixture.two.rewards": "exact_answer",
    "eval.num_prompts": 6,
  }
  words = toy_task.arguments(toy_model, evaluate.READS, **settings)
  evaluate.main([f"--model={toy_model}", *words, f"--out={out}"])
  result = json.loads(out.read_text())
  assert result["accuracy"] == 0.5
  each = result["data_sets"]
  assert each["one"]["accuracy"] == 1 and each["two"]["accuracy"] == 0
  printed = capsys.readouterr().out
  assert "12 held-out prompts" in printed
  assert re.search(r"\none, .*: 6 held-out prompts\n.*100.0%", printed)
  with pytest.raises(SystemExit, match="judged by easy, exact_answer"):
    evaluate.main([f"--model={toy_model}", *words, "--samples=2", "--majority"])
