"""The olmo3 family: Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import olmo2

KEYS = olmo2.KEYS
READ = olmo2.READ | {
  "rope_theta": 500_000.0,
  "sliding_window": 4096,
  "layer_types": None,
}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "olmo3"."""
  layers = range(1, hf_config["num_hidden_layers"] + 1)
  default = [layer % 4 != 0 for layer in layers]  # every fourth is global
  return TransformerConfig(
    **olmo2.common(hf_config),
    **config_json.window(hf_config, hf_config["sliding_window"], default),
    **config_json.ropes_by_layer_type(hf_config, hf_config["rope_theta"]),
  )
