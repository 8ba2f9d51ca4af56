"""The qwen2 family (Qwen2, Qwen2.5): Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS
READ = config_json.READ | {
  "num_key_value_heads": 32,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
  "layer_types": None,
}
FIXED = {"qkv_bias": True}


def window(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Reads the window, if any, by default from layer `max_window_layers` on."""
  size = (
    hf_config["sliding_window"] if hf_config["use_sliding_window"] else None
  )
  first = hf_config["max_window_layers"]
  layers = range(hf_config["num_hidden_layers"])
  default = [size is not None and i >= first for i in layers]
  return config_json.window(hf_config, size, default)


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "qwen2"."""
  return TransformerConfig(
    **config_json.common(hf_config) | {"qkv_bias": True},
    **window(hf_config),
    rope=config_json.rope(hf_config),
  )
