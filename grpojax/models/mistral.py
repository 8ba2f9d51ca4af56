"""The mistral family: Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json, llama
from grpojax.models.config import TransformerConfig

KEYS = llama.KEYS
READ = config_json.ROPE | {
  "num_key_value_heads": 8,
  "head_dim": None,
  "hidden_act": "silu",
  "tie_word_embeddings": False,
  "sliding_window": 4096,
}
FIXED = {"attention_bias": False, "mlp_bias": False}


def config(hf: dict[str, Any]) -> TransformerConfig:
  """Reads a config.json of model_type "mistral"."""
  hf = config_json.complete(hf, READ, FIXED)
  size = hf["sliding_window"]
  default = [size is not None] * hf["num_hidden_layers"]
  return TransformerConfig(
    **config_json.common(hf),
    **config_json.window(hf | {"layer_types": None}, size, default),
    rope=config_json.rope(hf),
  )
