"""The qwen3 family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import qwen2

KEYS = qwen2.KEYS | {
  "layers/q_norm": ("model.layers.{layer}.self_attn.q_norm.weight", False),
  "layers/k_norm": ("model.layers.{layer}.self_attn.k_norm.weight", False),
}
READ = qwen2.READ | {"head_dim": 128, "attention_bias": False}
FIXED = {"use_qk_norm": True}


def config(hf_config: dict[str, Any], **experts: Any) -> TransformerConfig:
  """Reads a complete config.json of model_type "qwen3", with any `experts`."""
  return TransformerConfig(
    **config_json.common(hf_config) | experts,
    **qwen2.window(hf_config),
    rope=config_json.rope(hf_config),
    qk_norm=True,
  )
