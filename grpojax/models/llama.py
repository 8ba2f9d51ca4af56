"""The llama family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models.transformer import TransformerConfig

# ours -> (Hugging Face's name, stored transposed); {} is the layer's index.
KEYS = {
  "embed": ("model.embed_tokens.weight", False),
  "final_norm": ("model.norm.weight", False),
  "head": ("lm_head.weight", True),
  "layers/attn_norm": ("model.layers.{}.input_layernorm.weight", False),
  "layers/q": ("model.layers.{}.self_attn.q_proj.weight", True),
  "layers/k": ("model.layers.{}.self_attn.k_proj.weight", True),
  "layers/v": ("model.layers.{}.self_attn.v_proj.weight", True),
  "layers/o": ("model.layers.{}.self_attn.o_proj.weight", True),
  "layers/q_bias": ("model.layers.{}.self_attn.q_proj.bias", False),
  "layers/k_bias": ("model.layers.{}.self_attn.k_proj.bias", False),
  "layers/v_bias": ("model.layers.{}.self_attn.v_proj.bias", False),
  "layers/o_bias": ("model.layers.{}.self_attn.o_proj.bias", False),
  "layers/mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", False),
  "layers/gate": ("model.layers.{}.mlp.gate_proj.weight", True),
  "layers/up": ("model.layers.{}.mlp.up_proj.weight", True),
  "layers/down": ("model.layers.{}.mlp.down_proj.weight", True),
  "layers/gate_bias": ("model.layers.{}.mlp.gate_proj.bias", False),
  "layers/up_bias": ("model.layers.{}.mlp.up_proj.bias", False),
  "layers/down_bias": ("model.layers.{}.mlp.down_proj.bias", False),
}


def rope_theta(hf: dict[str, Any]) -> float:
  """Rotary base; a scaled variant is refused, since it is not implemented."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind != "default":
    raise ValueError(
      f"config.json asks for rope_type={kind!r}; only 'default' is supported"
    )
  return float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0)))


def common(hf: dict[str, Any]) -> dict[str, Any]:
  """Fields that the families of this decoder read alike."""
  if hf.get("hidden_act", "silu") != "silu":
    raise ValueError(f"hidden_act={hf['hidden_act']!r}; only 'silu' is known")
  heads = hf["num_attention_heads"]
  return {
    "vocab_size": hf["vocab_size"],
    "width": hf["hidden_size"],
    "layers": hf["num_hidden_layers"],
    "heads": heads,
    "kv_heads": hf.get("num_key_value_heads") or heads,
    "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
    "mlp": hf["intermediate_size"],
    "rope_theta": rope_theta(hf),
    "norm_eps": hf.get("rms_norm_eps", 1e-6),
    "tied": hf.get("tie_word_embeddings", False),
  }


def config(hf: dict[str, Any]) -> TransformerConfig:
  """Reads a config.json of model_type "llama"."""
  attention_bias = hf.get("attention_bias", False)
  return TransformerConfig(
    **common(hf),
    qkv_bias=attention_bias,
    o_bias=attention_bias,
    mlp_bias=hf.get("mlp_bias", False),
  )
