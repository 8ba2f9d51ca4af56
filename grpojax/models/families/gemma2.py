"""The gemma2 family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS | {
  f"layers/{name}": (f"model.layers.{{layer}}.{hf_name}.weight", False)
  for name, hf_name in (
    ("attn_post_norm", "post_attention_layernorm"),
    ("mlp_norm", "pre_feedforward_layernorm"),
    ("mlp_post_norm", "post_feedforward_layernorm"),
  )
}
READ = config_json.READ | {
  "num_key_value_heads": 4,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "tie_word_embeddings": True,
  "attention_bias": False,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
  "layer_types": None,
  "attn_logit_softcapping": 50.0,
  "final_logit_softcapping": 30.0,
}
# `hidden_act` is the old name of `hidden_activation`; transformers ignores it.
FIXED = {
  "hidden_act": "gelu_pytorch_tanh",
  "use_bidirectional_attention": False,
}


def common(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of `TransformerConfig` shared by gemma2 and gemma3."""
  return config_json.common(hf_config) | {
    "norm_offset": True,
    "post_norms": True,
    "embedding_scale": hf_config["hidden_size"] ** 0.5,
    "attention_scale": hf_config["query_pre_attn_scalar"] ** -0.5,
    "attention_cap": hf_config["attn_logit_softcapping"],
    "logits_cap": hf_config["final_logit_softcapping"],
  }


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "gemma2"."""
  default = [i % 2 == 0 for i in range(hf_config["num_hidden_layers"])]
  return TransformerConfig(
    **common(hf_config),
    **config_json.window(hf_config, hf_config["sliding_window"], default),
    rope=config_json.rope(hf_config),
  )
