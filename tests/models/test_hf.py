"""Weights in and out, against transformers on random checkpoints."""

import json

import jax
import numpy as np
import pytest

from grpojax.models import hf

HEADS = {"head_dim": 6}
CONFIGS = {  # their logits and gradients are compared in test_families
  "llama": ("llama", {"rms_norm_eps": 1e-5}),
  "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
  "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
  "qwen3": ("qwen3", HEADS),
  "mistral": ("mistral", {}),
  "gemma2": ("gemma2", HEADS),
  "gemma3": ("gemma3_text", HEADS | {"rope_parameters": None}),
  "qwen3_moe": (
    "qwen3_moe",
    HEADS
    | {
      "moe_intermediate_size": 12,
      "num_experts": 4,
      "num_experts_per_tok": 2,
    },
  ),
}


@pytest.fixture(params=CONFIGS)
def checkpoint(request, tmp_path):
  """A random checkpoint made by transformers, and transformers' own model."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  kind, changes = CONFIGS[request.param]
  values = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
  } | changes
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(kind, **values)
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  with torch.no_grad():  # zero biases and unit norms would hide mistakes
    for parameter in model.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
  model.save_pretrained(tmp_path / "model")
  return tmp_path / "model", model


def test_save_is_bit_exact_and_transformers_reads_it(checkpoint, tmp_path):
  import transformers

  path, model = checkpoint
  params = hf.load_params(path)
  hf.save(tmp_path / "out", params, path)
  again = hf.load_params(tmp_path / "out")
  assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
  read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  for name, tensor in model.state_dict().items():
    np.testing.assert_array_equal(read.state_dict()[name], tensor)


def test_bad_directories_are_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match="no model at .*nowhere"):
    hf.load(tmp_path / "nowhere")
  base = {"model_type": "gpt2", "hidden_size": 8}
  (tmp_path / "config.json").write_text(json.dumps(base))
  with pytest.raises(ValueError, match="'gpt2' is not supported"):
    hf.load(tmp_path)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_unsupported_values_and_missing_tensors_are_refused(checkpoint):
  path, _ = checkpoint
  config = json.loads((path / "config.json").read_text())
  deeper = config | {"num_hidden_layers": 4, "layer_types": None}
  (path / "config.json").write_text(json.dumps(deeper))
  with pytest.raises(ValueError, match="missing.*layers.3"):
    hf.load(path)
  scaled = config | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
  (path / "config.json").write_text(json.dumps(scaled))
  with pytest.raises(ValueError, match="yarn"):
    hf.load(path)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_file_that_is_no_safetensors_is_refused(checkpoint):
  path, _ = checkpoint
  (path / "model.safetensors").write_text("version https://git-lfs")
  with pytest.raises(ValueError, match="not a whole safetensors file"):
    hf.load(path)
