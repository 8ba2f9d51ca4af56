"""The qwen2 family (Qwen2, Qwen2.5): Hugging Face's configuration."""

from typing import Any

from grpojax.models import llama
from grpojax.models.transformer import TransformerConfig

KEYS = llama.KEYS


def config(hf: dict[str, Any]) -> TransformerConfig:
  """Reads a config.json of model_type "qwen2"."""
  layer_types = hf.get("layer_types") or []
  if hf.get("use_sliding_window") or "sliding_attention" in layer_types:
    raise ValueError(
      "config.json asks for sliding-window attention, which is not supported"
    )
  return TransformerConfig(**llama.common(hf), qkv_bias=True)
