"""The timing of a config: its rates; small runs."""

import json

import jax.numpy as jnp
import pytest

from grpojax.aot.chips import CHIPS, of_kind
from grpojax.benchmarks import configured, workloads
from grpojax.training.config import default_config, from_config

B, G, P, T = 2, 4, 3, 6
SMALL = workloads.MODEL | {"vocab_size": 40, "hidden_size": 8}
SMALL |= {"intermediate_size": 12, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


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


def test_chips_by_the_kind_of_their_devices():
  assert of_kind("TPU v5 lite") == CHIPS["v5e"]
  assert of_kind("TPU v5") == CHIPS["v5p"]
  assert of_kind("TPU v6 lite") == CHIPS["v6e"]
  assert of_kind("NVIDIA H100 80GB HBM3") == CHIPS["h100"]
  assert of_kind("NVIDIA A100-SXM4-80GB") == CHIPS["a100"]
  for kind in ("cpu", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB"):
    assert of_kind(kind) is None


def test_what_is_in_no_table_is_measured(monkeypatch):
  assert 1e5 < configured.measure_flops(jnp.float32, 64) < 1e16
  monkeypatch.setattr(configured, "measure_flops", lambda dtype: 8e9)
  # The devices of a CPU share it.
  assert configured.find_machine("cpu", 2, "float32")[1:3] == (2, 4e9)
  machine = configured.find_machine("TPU7x", 2, "float32")  # two a chip
  assert machine.flops == 2307e12 / 2


ON_DEVICE = {"reward.on_device": True, "model.path": "arithmetic-instruct"}
ON_DEVICE |= {"data.max_prompt_length": 32}
AUTOMATIC = {"group_size": "auto", "batch_size": 4, "diagnostics.every": 1}
AUTOMATIC |= {"auto_group_size.start": 4, "auto_group_size.largest": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"lora.rank": 2, "model.dtype": "bfloat16"},
    pytest.param(ON_DEVICE, marks=pytest.mark.long),
    pytest.param(AUTOMATIC, marks=pytest.mark.long),
  ],
)
def test_other_runs(config, monkeypatch, changes):
  monkeypatch.setattr(configured, "measure_flops", lambda dtype: 1e9)
  config.update_from_flattened_dict(changes)
  found = configured.measure(configured.open_run(from_config(config)), 1, 1)
  assert found["seconds"]["step"]["median"] > 0
  assert found["tokens_per_step"] == config.batch_size * 4 * T
  assert configured.lines(found)
