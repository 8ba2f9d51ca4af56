"""The llama family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig

# Path in our parameters: (Hugging Face's name, True if stored transposed)
KEYS = {
  "embed": ("model.embed_tokens.weight", False),
  "final_norm": ("model.norm.weight", False),
  "head": ("lm_head.weight", True),
  "score": ("score.weight", True),
} | {
  f"layers/{name}": (f"model.layers.{{layer}}.{hf_name}", transposed)
  for name, hf_name, transposed in (
    ("attn_norm", "input_layernorm.weight", False),
    ("q", "self_attn.q_proj.weight", True),
    ("k", "self_attn.k_proj.weight", True),
    ("v", "self_attn.v_proj.weight", True),
    ("o", "self_attn.o_proj.weight", True),
    ("q_bias", "self_attn.q_proj.bias", False),
    ("k_bias", "self_attn.k_proj.bias", False),
    ("v_bias", "self_attn.v_proj.bias", False),
    ("o_bias", "self_attn.o_proj.bias", False),
    ("mlp_norm", "post_attention_layernorm.weight", False),
    ("gate", "mlp.gate_proj.weight", True),
    ("up", "mlp.up_proj.weight", True),
    ("down", "mlp.down_proj.weight", True),
    ("gate_bias", "mlp.gate_proj.bias", False),
    ("up_bias", "mlp.up_proj.bias", False),
    ("down_bias", "mlp.down_proj.bias", False),
  )
}
READ = config_json.READ | {"attention_bias": False, "mlp_bias": False}
# nanotron adds this key to exported models.
FIXED = {"is_llama_config": True}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "llama"."""
  return TransformerConfig(
    **config_json.common(hf_config), rope=config_json.rope(hf_config)
  )
