"""Both kinds of timing on a decoder of few numbers.

They share what the reference and the update compile to.
"""

import json
import math
import statistics

import numpy as np
import pytest

from grpojax.benchmarks import clock, configured, side_by_side, workloads
from grpojax.training.config import from_config

B, G, P, T = SIZES = 2, 2, 3, 6


@pytest.fixture
def config(monkeypatch):
  """Of the workload "tail" with few tokens."""
  model = workloads.MODEL | {"hidden_size": 8, "intermediate_size": 8}
  model |= {"num_attention_heads": 2, "num_key_value_heads": 1}
  model |= {"num_hidden_layers": 1, "vocab_size": 40}
  sizes = workloads.Workload(*SIZES, mean_length=3, model=model)
  monkeypatch.setitem(workloads.WORKLOADS, "tail", sizes)
  config = workloads.config_of("tail")
  config.optim.micro_batches, config.eval.batch_size = 1, B
  config.steps, config.model.remat = 3, "none"
  return config


@pytest.mark.slow
def test_a_workload(config, capsys, monkeypatch):
  monkeypatch.setattr(clock, "QUIET", math.inf)  # whatever else is running
  line = side_by_side.measure("tail", from_config(config), 2, 1)
  assert line["steps"] == 2 and line["first_step_s"] == line["warmup_s"][0]
  sizes = workloads.WORKLOADS["tail"]
  planned = [workloads.lengths(sizes, i) for i in range(3)]
  assert len({int(x.sum()) for x in planned}) > 1  # so that they can differ
  assert line["lengths_as_planned"] is True
  tokens = [int(x.sum()) for x in planned[1:]]
  assert line["tokens_per_step"]["median"] == statistics.median(tokens)
  assert line["longest"]["max"] == max(x.max() for x in planned[1:])
  # Each completion has as many words as it has tokens, about half with "a".
  assert 0 < np.mean(line["rewards"]) < np.mean([x.mean() for x in planned])
  assert line["compilations_warmup"] >= 3  # later ones are of packed rows
  for step in line["per_step"].values():
    parts = ("rollout", "ref_logprobs", "update", "score_other")
    total = sum(step[part] for part in parts)
    assert total == pytest.approx(step["total"], abs=0.01)
  assert capsys.readouterr().out == ""  # the line is printed by the program


@pytest.mark.slow
def test_a_workload_of_turns(config, monkeypatch):
  """Two turns of two tokens, and an observation of three."""
  model = workloads.WORKLOADS["tail"].model
  own = workloads.WORKLOADS["turns"].settings | {
    "environment.options": {"tokens": 3},
    "environment.max_turns": 2,
    "environment.max_turn_tokens": 2,
  }
  sizes = workloads.Workload(B, G, P, 7, model=model, settings=own)
  monkeypatch.setitem(workloads.WORKLOADS, "turns", sizes)
  settings = from_config(workloads.config_of("turns"))
  line = side_by_side.measure("turns", settings, 2, 1)
  assert line["lengths_as_planned"] is True
  assert line["tokens_per_step"]["median"] == B * G * 7
  assert 0 < np.mean(line["rewards"]) <= 2  # words of the last turn alone


@pytest.mark.slow
def test_a_config(config, monkeypatch, tmp_path):
  monkeypatch.setattr(configured, "measure_flops", lambda dtype: 1e9)
  file = tmp_path / "model.json"
  file.write_text(json.dumps(workloads.WORKLOADS["tail"].model))
  config.model.path = str(file)
  config.reward.functions = ("math_answer",)  # which needs an example
  found = configured.measure(configured.open_run(from_config(config)), 2, 1)
  seconds = found["seconds"]
  assert list(seconds) == ["rollout", "rewards", "reference", "update", "step"]
  assert found["tokens_per_step"] == B * G * T  # none ends by chance
  assert len(found["per_step"]) == 2 and found["compilations"] >= 3
  median = {part: values["median"] for part, values in seconds.items()}
  assert found["tokens_per_second"]["step"] == B * G * T / median["step"]
  flops = found["flops"]
  assert found["flops_of_peak"]["step"] == pytest.approx(
    sum(flops[p] for p in ("rollout", "reference", "update"))
    / (median["step"] * 1e9)
  )
  json.dumps(found)
  text = "\n".join(configured.lines(found))
  assert "2 prompts x 2 completions, 3 + 6 tokens" in text
  assert f"{median['update']:.3f}" in text
  assert "peak: 1 GFLOP/s a device (measured, float32)" in text
