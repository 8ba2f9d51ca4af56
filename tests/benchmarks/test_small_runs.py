"""Both kinds of timing on a tiny decoder, and peaks of machines.

They share the compiled reference and update.
"""

import json
import math
import statistics

import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot.chips import CHIPS, of_kind
from grpojax.benchmarks import clock, configured, side_by_side, workloads
from grpojax.training.config import from_config

B, G, P, T = SIZES = 2, 2, 3, 6


@pytest.fixture
def config(monkeypatch):
  """The config of the workload "tail" with few tokens."""
  model = workloads.MODEL | {"hidden_size": 8, "intermediate_size": 8}
  model |= {"num_attention_heads": 2, "num_key_value_heads": 1}
  model |= {"num_hidden_layers": 1, "vocab_size": 40}
  sizes = workloads.Workload(*SIZES, mean_length=3, model=model)
  monkeypatch.setitem(workloads.WORKLOADS, "tail", sizes)
  config = workloads.config_of("tail")
  config.optim.micro_batches = 1
  config.eval.batch_size = B
  config.steps = 3
  config.model.remat = "none"
  return config


@pytest.mark.slow
def test_workload(config, capsys, monkeypatch):
  monkeypatch.setattr(clock, "QUIET", math.inf)  # ignores other processes
  line = side_by_side.measure("tail", from_config(config), 2, 1)
  assert line["steps"] == 2 and line["first_step_s"] == line["warmup_s"][0]
  sizes = workloads.WORKLOADS["tail"]
  planned = [workloads.lengths(sizes, i) for i in range(3)]
  assert len({int(x.sum()) for x in planned}) > 1  # not trivially equal
  assert line["lengths_as_planned"] is True
  tokens = [int(x.sum()) for x in planned[1:]]
  assert line["tokens_per_step"]["median"] == statistics.median(tokens)
  assert line["longest"]["max"] == max(x.max() for x in planned[1:])
  # A completion has a word per token, about half of them with "a".
  assert 0 < np.mean(line["rewards"]) < np.mean([x.mean() for x in planned])
  assert line["compilations_warmup"] >= 3  # later, only packed rows compile
  for step in line["per_step"].values():
    parts = ("rollout", "ref_logprobs", "update", "score_other")
    total = sum(step[part] for part in parts)
    assert total == pytest.approx(step["total"], abs=0.01)
  assert capsys.readouterr().out == ""  # the line is printed by the program


@pytest.fixture
def with_file(config, monkeypatch, tmp_path):
  """The config with its model in a file, on a machine of 1 GFLOP/s."""
  monkeypatch.setattr(configured, "measure_flops", lambda dtype: 1e9)
  file = tmp_path / "model.json"
  file.write_text(json.dumps(workloads.WORKLOADS["tail"].model))
  config.model.path = str(file)
  return config


ON_DEVICE = {"reward.on_device": True, "model.path": "arithmetic-instruct"}
ON_DEVICE |= {"data.max_prompt_length": 32}
ON_DEVICE |= {"reward.functions": ("exact_answer",)}


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"lora.rank": 2, "model.dtype": "bfloat16"},
    pytest.param(ON_DEVICE, marks=pytest.mark.long),
  ],
)
def test_bench_with_other_settings(with_file, changes):
  with_file.update_from_flattened_dict(changes)
  run = configured.open_run(from_config(with_file))
  report = configured.measure(run, 1, 1)
  assert report["seconds"]["step"]["median"] > 0
  assert report["tokens_per_step"] == B * G * T
  assert configured.lines(report)


@pytest.mark.slow
def test_bench_report(with_file):
  with_file.reward.functions = ("math_answer",)  # which needs an example
  report = configured.measure(configured.open_run(from_config(with_file)), 2, 1)
  seconds = report["seconds"]
  assert list(seconds) == ["rollout", "rewards", "reference", "update", "step"]
  assert report["tokens_per_step"] == B * G * T  # completions have full length
  assert len(report["per_step"]) == 2 and report["compilations"] >= 3
  median = {part: values["median"] for part, values in seconds.items()}
  assert report["tokens_per_second"]["step"] == B * G * T / median["step"]
  flops = sum(report["flops"][p] for p in ("rollout", "reference", "update"))
  share = flops / (median["step"] * 1e9)
  assert report["flops_of_peak"]["step"] == pytest.approx(share)
  json.dumps(report)
  text = "\n".join(configured.lines(report))
  assert "2 prompts x 2 completions, 3 + 6 tokens" in text
  assert f"{median['update']:.3f}" in text
  assert "peak: 1 GFLOP/s per device (measured, float32)" in text


def test_chips_by_device_kind():
  names = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
  names |= {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100"}
  for kind, name in names.items():
    assert of_kind(kind) == CHIPS[name]
  for kind in ("cpu", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB"):
    assert of_kind(kind) is None


def test_unknown_devices_are_measured(monkeypatch):
  assert 1e5 < configured.measure_flops(jnp.float32, 64) < 1e16
  monkeypatch.setattr(configured, "measure_flops", lambda dtype: 8e9)
  # CPU devices share the rate.
  assert configured.peak_flops("cpu", 2, "float32")[0] == 4e9
  # Two devices per chip.
  assert configured.peak_flops("TPU7x", 2, "float32")[0] == 2307e12 / 2
