"""The granite family (dense Granite 3 and 4): Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS
READ = llama.READ | {
  "max_position_embeddings": 2048,
  "embedding_multiplier": 1.0,
  "attention_multiplier": 1.0,
  "residual_multiplier": 1.0,
  "logits_scaling": 1.0,
}


def common(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields shared by granite and granitemoehybrid."""
  return config_json.common(hf_config) | {
    "embedding_scale": float(hf_config["embedding_multiplier"]),
    "attention_scale": float(hf_config["attention_multiplier"]),
    "residual_scale": float(hf_config["residual_multiplier"]),
    "logits_divisor": float(hf_config["logits_scaling"]),
  }


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "granite"."""
  return TransformerConfig(
    **common(hf_config), rope=config_json.rope(hf_config)
  )
