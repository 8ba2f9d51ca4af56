"""The ministral3 family (Ministral 3): Hugging Face's configuration."""

import dataclasses
from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import mistral

KEYS = mistral.KEYS
READ = mistral.READ | {
  "head_dim": 128,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 262_144,
  "sliding_window": None,
}
_ROPE = {  # transformers' default
  "rope_type": "yarn",
  "rope_theta": 1_000_000.0,
  "factor": 16.0,
  "original_max_position_embeddings": 16_384,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
  "llama_4_scaling_beta": 0.1,
}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "ministral3"."""
  parameters = {"rope_theta": hf_config["rope_theta"]} | (
    hf_config["rope_scaling"] or hf_config["rope_parameters"] or _ROPE
  )
  parameters.pop("max_position_embeddings", None)  # not used
  name = "llama_4_scaling_beta"
  beta = config_json.number(name, parameters.pop(name, None) or 0.0, 0.0)
  length = hf_config["max_position_embeddings"]
  rope = config_json.parse_rope(parameters, length)
  return TransformerConfig(
    **config_json.common(hf_config),
    **mistral.window(hf_config),
    rope=dataclasses.replace(rope, query_beta=beta),
  )
