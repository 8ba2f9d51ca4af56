"""The text models of gemma3: Hugging Face's configuration and names."""

from typing import Any

from grpojax.models import config_json, gemma2, qwen3
from grpojax.models.config import TransformerConfig

KEYS = qwen3.KEYS | gemma2.KEYS
READ = gemma2.READ | {
  "rope_theta": 1_000_000.0,
  "rope_local_base_freq": 10_000.0,
  "sliding_window_pattern": None,
  "_sliding_window_pattern": None,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
}
# transformers knows an attention cap by name, but does not apply it.
FIXED = gemma2.FIXED | {"attn_logit_softcapping": None}


def _ropes(hf: dict[str, Any]) -> dict[str, Any]:
  """Two bases; only the one of the global layers may be scaled."""
  kinds = hf["rope_parameters"] or {}
  config_json.refuse_others("rope_parameters", kinds, config_json.LAYER_TYPES)
  parts = {
    kind: {"rope_theta": hf[base]} | (kinds.get(kind) or {})
    for kind, base in (
      ("full_attention", "rope_theta"),
      ("sliding_attention", "rope_local_base_freq"),
    )
  }
  parts["full_attention"] |= hf["rope_scaling"] or {}
  length = hf["max_position_embeddings"]
  return {
    "rope": config_json.parse_rope(parts["full_attention"], length),
    "local_rope": config_json.parse_rope(parts["sliding_attention"], length),
  }


def config(hf: dict[str, Any]) -> TransformerConfig:
  """Reads a config.json of model_type "gemma3_text"."""
  hf = config_json.complete(hf, READ, FIXED)
  every = hf["sliding_window_pattern"] or hf["_sliding_window_pattern"] or 6
  default = [(i + 1) % every != 0 for i in range(hf["num_hidden_layers"])]
  return TransformerConfig(
    **gemma2.common(hf),
    **config_json.window(hf, hf["sliding_window"], default),
    **_ropes(hf),
    qk_norm=True,
  )
