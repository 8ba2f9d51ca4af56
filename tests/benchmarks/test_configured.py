"""The timing of a config: its rates against sums by hand; a small run."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from grpojax.aot import programs
from grpojax.aot.chips import CHIPS, of_kind
from grpojax.aot.report import part_flops
from grpojax.benchmarks import configured, limits, workloads
from grpojax.core import mesh as mesh_lib
from grpojax.training.config import default_config, from_config

ROOT = pathlib.Path(__file__).parents[2]
B, G, P, T = 2, 4, 3, 6
V, D, F, L = 40, 8, 12, 2  # one kv head of two heads of 4
SMALL = workloads.MODEL | {
  "vocab_size": V,
  "hidden_size": D,
  "intermediate_size": F,
  "num_hidden_layers": L,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
}
MATRICES = L * (2 * D * D + 2 * D * 4 + 3 * D * F)
PARAMETERS = MATRICES + V * D + L * (D + 2 * 4 + 2 * D) + D


@pytest.fixture
def config(tmp_path):
  file = tmp_path / "model.json"
  file.write_text(json.dumps(SMALL))
  config = default_config()
  config.model.path, config.loss.beta = str(file), 0.1
  config.batch_size, config.group_size = B, G
  config.data.max_prompt_length, config.sampling.max_new_tokens = P, T
  config.optim.micro_batches, config.eval.batch_size = 2, B
  return config


def open_run(config, **changes):
  config.update_from_flattened_dict(changes)
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  return programs.open_run(from_config(config), mesh)


def test_operations_by_part(config):
  tokens = MATRICES * B * (P + G * T) + V * D * B * G * T
  expected = {"rollout": 2 * tokens, "update": 6 * tokens}
  run = open_run(config)
  assert part_flops(run) == expected | {"reference": 2 * tokens}
  run = open_run(config, **{"loss.beta": 0.0})
  assert part_flops(run) == expected | {"reference": 0}


def test_bytes_by_part(config):
  found = limits.least_bytes(open_run(config))
  # Tokens 2 to T: the prompt once, and 1 + ... + T - 1 tokens of each sample.
  keys = (T - 1) * B * P + B * G * (T * (T - 1) // 2)
  token = 2 * L * 4  # keys and values
  assert found["rollout"] == 4 * ((T - 1) * PARAMETERS + keys * token)
  assert found["reference"] == 2 * 4 * PARAMETERS
  # Twice in each of two micro-batches, gradients added twice and read once;
  # parameters and two moments read and written; the few numbers are counts.
  whole = 4 * PARAMETERS
  assert 0 <= found["update"] - (4 + 5 + 6) * whole <= 2 * 16
  more = {"loss.top_entropy_quantile": 0.2, "optim.minibatches": 2}
  more |= {"loss.old_logprobs": "trainer"}
  # Both minibatches: twice scored before, and once more in each update.
  again = limits.least_bytes(open_run(config, **more))
  assert again["reference"] == 2 * 2 * 2 * whole
  assert again["update"] == 2 * (found["update"] + 2 * whole)


def test_bytes_in_a_window_and_in_bfloat16(config):
  run = open_run(config, **{"model.dtype": "bfloat16"})
  local = dataclasses.replace(run.model, window=4, local_layers=(True, False))
  found = limits.least_bytes(run._replace(model=local))
  keys = sum(B * (P + G * t) for t in range(1, T))
  near = sum(B * (min(P, 4 - min(t, 4)) + G * min(t, 4)) for t in range(1, T))
  caches = (keys + near) * 2 * 4
  assert found["rollout"] == 2 * ((T - 1) * PARAMETERS + caches)


def test_chips_by_the_kind_of_their_devices():
  assert of_kind("TPU v5 lite") == CHIPS["v5e"]
  assert of_kind("TPU v5") == CHIPS["v5p"]
  assert of_kind("TPU v6 lite") == CHIPS["v6e"]
  assert of_kind("NVIDIA H100 80GB HBM3") == CHIPS["h100"]
  for kind in ("cpu", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB"):
    assert of_kind(kind) is None


def test_the_devices_of_a_cpu_share_what_was_measured(monkeypatch):
  monkeypatch.setattr(limits, "measured", lambda dtype: (8e9, 4e9))
  found = limits.find("cpu", 2, "float32")
  assert (found.flops, found.bandwidth, found.count) == (4e9, 2e9, 2)
  found = limits.find("TPU7x", 2, "float32")  # two devices a chip
  assert (found.flops, found.bandwidth) == (2307e12 / 2, 7380e9 / 2)


def test_what_is_in_no_table_is_measured():
  flops, bandwidth = limits.measured(jnp.float32, 64, 1000)
  assert 1e5 < flops < 1e16 and 1e4 < bandwidth < 1e14


def test_bytes_of_experts_and_of_a_head_of_its_own(config, tmp_path):
  file = ROOT / "tests/data/model_configs/Qwen3-30B-A3B.json"
  hf_config = json.loads(file.read_text())
  hf_config |= {"num_hidden_layers": 1, "vocab_size": 100}
  assert not hf_config["tie_word_embeddings"]
  config.model.path = str(tmp_path / "experts.json")
  (tmp_path / "experts.json").write_text(json.dumps(hf_config))
  small = {"batch_size": 1, "group_size": 2, "optim.micro_batches": 1}
  found = limits.least_bytes(open_run(config, **small))
  # Width 2048, 32 heads and 4 kv heads of 128; 2 samples x 8 of 128 experts.
  layer = 2048 * (2 * 32 + 2 * 4) * 128 + 2048 * 128 + 2 * 2048 + 2 * 128
  rest = layer + 2048 + 100 * 2048
  expert = 3 * 2048 * 768
  caches = sum(P + 2 * t for t in range(1, T)) * 2 * 4 * 128
  weights = rest + 16 * expert
  assert found["rollout"] == 4 * ((T - 1) * weights + caches)
  assert found["reference"] == 4 * (rest + 2 * T * 8 * expert)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"lora.rank": 2, "model.dtype": "bfloat16"},
    {"reward.on_device": True, "model.path": "arithmetic-instruct"}
    | {"data.max_prompt_length": 32},
    {"group_size": "auto", "batch_size": 4}
    | {"auto_group_size.start": 4, "auto_group_size.largest": 4}
    | {"diagnostics.every": 1},
  ],
  ids=["adapters", "on the device", "automatic groups"],
)
def test_other_runs(config, monkeypatch, changes):
  monkeypatch.setattr(limits, "measured", lambda dtype: (1e9, 2e9))
  config.update_from_flattened_dict(changes)
  found = configured.measure(configured.open_run(from_config(config)), 1, 1)
  assert found["seconds"]["step"]["median"] > 0
  assert found["tokens_per_step"] == config.batch_size * 4 * T
  assert configured.lines(found)
