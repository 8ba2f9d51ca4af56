"""The families mistral and ministral: Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS
READ = config_json.READ | {
  "num_key_value_heads": 8,
  "sliding_window": 4096,
  "layer_types": None,
}


def window(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Reads the window, by default of all layers.

  transformers ignores layer_types except for ministral, so others that differ
  from the default are refused.
  """
  size = hf_config["sliding_window"]
  layers = hf_config["num_hidden_layers"]
  default = [size is not None] * layers
  fields = config_json.window(hf_config, size, default)
  local = fields.get("local_layers", (False,) * layers)
  if hf_config["model_type"] != "ministral" and local != tuple(default):
    kinds = hf_config["layer_types"]
    raise ValueError(
      f"config.json has layer_types={kinds!r:.80}, which transformers ignores "
      'for this family: set model_type to "ministral" in a copy of the '
      "directory, or sliding_window to null if all layers are full_attention"
    )
  return fields


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "mistral" or "ministral"."""
  return TransformerConfig(
    **config_json.common(hf_config),
    **window(hf_config),
    rope=config_json.rope(hf_config),
  )
