"""The mistral family: Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS
READ = config_json.READ | {"num_key_value_heads": 8, "sliding_window": 4096}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "mistral"."""
  size = hf_config["sliding_window"]
  default = [size is not None] * hf_config["num_hidden_layers"]
  return TransformerConfig(
    **config_json.common(hf_config),
    **config_json.window(hf_config, size, default),
    rope=config_json.rope(hf_config),
  )
