"""The qwen2 family (Qwen2, Qwen2.5): Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json, llama
from grpojax.models.config import TransformerConfig

KEYS = llama.KEYS
WINDOW = {
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
  "layer_types": None,
}
READ = (
  config_json.ROPE
  | WINDOW
  | {
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
  }
)


def window(hf: dict[str, Any]) -> dict[str, Any]:
  """Sliding windows: from layer `max_window_layers` on, if they are used."""
  size = hf["sliding_window"] if hf["use_sliding_window"] else None
  first = hf["max_window_layers"]
  layers = range(hf["num_hidden_layers"])
  default = [size is not None and i >= first for i in layers]
  return config_json.window(hf, size, default)


def config(hf: dict[str, Any]) -> TransformerConfig:
  """Reads a config.json of model_type "qwen2"."""
  hf = config_json.complete(hf, READ)
  return TransformerConfig(
    **config_json.common(hf),
    **window(hf),
    rope=config_json.rope(hf),
    qkv_bias=True,
  )
