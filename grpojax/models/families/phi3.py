"""The phi3 family (Phi-3 and Phi-4-mini): Hugging Face's configuration."""

import dataclasses
import math
from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama
from grpojax.models.rope import Rope

_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"
_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj.weight"
# Matrices with the same name are parts of one stored matrix, in this order.
KEYS = llama.KEYS | {
  f"layers/{name}": (hf_name, True)
  for name, hf_name in (
    ("q", _QKV),
    ("k", _QKV),
    ("v", _QKV),
    ("gate", _GATE_UP),
    ("up", _GATE_UP),
  )
}
READ = config_json.READ | {
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 4096,
  "original_max_position_embeddings": 4096,
  "partial_rotary_factor": 1.0,
  "sliding_window": None,
}
FIXED = {
  "full_attn_mod": 1,
  "interpolate_factor": 1,
  # Phi-4-mini's own code computes the same as transformers' class.
  "auto_map": {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    "AutoTokenizer": "Xenova/gpt-4o",
  },
}


def _rope(hf_config: dict[str, Any]) -> Rope:
  """Reads the rotary embedding; of longrope, its short factors.

  transformers uses the short factors for texts of at most
  original_max_position_embeddings tokens, the limit `Rope.longest`.
  """
  name = "partial_rotary_factor"
  parameters = {"rope_theta": hf_config["rope_theta"], name: hf_config[name]}
  parameters |= hf_config["rope_scaling"] or hf_config["rope_parameters"] or {}
  share = config_json.number(name, parameters.pop(name), 0.0)
  kind = parameters.get("rope_type") or parameters.get("type") or "default"
  config_json.refuse_others("rope_type", [kind], ("default", "longrope", "su"))
  length = hf_config["max_position_embeddings"]
  if kind == "default":
    rope = config_json.parse_rope(parameters, length)
    return dataclasses.replace(rope, share=share)
  known = "rope_theta rope_type type factor short_factor long_factor "
  known += "attention_factor original_max_position_embeddings"
  config_json.refuse_others(
    "the rope parameters of longrope", parameters, known.split()
  )
  name = "original_max_position_embeddings"
  short = hf_config[name]
  config_json.number(name, short, 2.0)
  factor = parameters.get("factor") or length / short
  attention = math.sqrt(1 + math.log(max(factor, 1)) / math.log(short))
  number = lambda x: config_json.number("short_factor", x)
  return Rope(
    config_json.number("rope_theta", parameters["rope_theta"]),
    divisors=tuple(map(number, parameters["short_factor"])),
    share=share,
    attention_factor=float(parameters.get("attention_factor") or attention),
    longest=short,
  )


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "phi3"."""
  size = hf_config["sliding_window"]
  if size and size >= hf_config["max_position_embeddings"]:
    size = None  # no text is longer
  default = [size is not None] * hf_config["num_hidden_layers"]
  return TransformerConfig(
    **config_json.common(hf_config),
    **config_json.window(hf_config, size, default),
    rope=_rope(hf_config),
  )
