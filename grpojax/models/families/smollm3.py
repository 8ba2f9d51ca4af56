"""The smollm3 family: Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS
READ = llama.READ | {
  "num_key_value_heads": 4,
  "rope_theta": 2_000_000.0,
  "max_position_embeddings": 32_768,
  "tie_word_embeddings": True,
  "use_sliding_window": False,
  "sliding_window": None,
  "layer_types": None,
  "no_rope_layers": None,  # 0 for each layer without RoPE, 1 for others
  "no_rope_layer_interval": 4,
}
UNUSED = {"max_window_layers"}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "smollm3"."""
  layers = hf_config["num_hidden_layers"]
  interval = hf_config["no_rope_layer_interval"]
  default = [(i + 1) % interval != 0 for i in range(layers)]
  rotated = hf_config["no_rope_layers"] or default
  if len(rotated) < layers or not all(x in (0, 1) for x in rotated):
    raise ValueError(
      f"config.json has no_rope_layers={rotated!r:.80}: use 0 or 1 for each of "
      f"{layers} layers"
    )
  rotated = [bool(x) for x in rotated[:layers]]
  size = (
    hf_config["sliding_window"] if hf_config["use_sliding_window"] else None
  )
  local = [size is not None and not x for x in rotated]
  fields = config_json.rotated_layers(
    config_json.rope(hf_config),
    rotated,
    config_json.window(hf_config, size, local),
  )
  return TransformerConfig(**config_json.common(hf_config), **fields)
