"""The olmo2 family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import qwen3

KEYS = qwen3.KEYS | {
  f"layers/{name}": (f"model.layers.{{layer}}.{hf_name}.weight", False)
  for name, hf_name in (
    ("attn_post_norm", "post_attention_layernorm"),
    ("mlp_post_norm", "post_feedforward_layernorm"),
  )
}
READ = config_json.READ | {
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 2048,
  "attention_bias": False,
}


def common(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of `TransformerConfig` shared by olmo2 and olmo3."""
  return config_json.common(hf_config) | {
    "pre_norms": False,
    "post_norms": True,
    "wide_qk_norm": True,
  }


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "olmo2"."""
  return TransformerConfig(
    **common(hf_config), rope=config_json.rope(hf_config)
  )
