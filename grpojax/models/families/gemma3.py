"""The text models of gemma3: Hugging Face's configuration and names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import gemma2, qwen3

KEYS = qwen3.KEYS | gemma2.KEYS
READ = gemma2.READ | {
  "rope_theta": 1_000_000.0,
  "rope_local_base_freq": 10_000.0,
  "sliding_window_pattern": None,
  "_sliding_window_pattern": None,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
}
# transformers ignores this key for gemma3, so a cap is refused.
FIXED = gemma2.FIXED | qwen3.FIXED | {"attn_logit_softcapping": None}


def _ropes(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Reads the rotary embeddings of global and of local layers."""
  by_type = hf_config["rope_parameters"] or {}
  config_json.refuse_others("rope_parameters", by_type, config_json.LAYER_TYPES)
  full, sliding = (by_type.get(kind) or {} for kind in config_json.LAYER_TYPES)
  full = {"rope_theta": hf_config["rope_theta"]} | full
  full |= hf_config["rope_scaling"] or {}  # not for local layers
  sliding = {"rope_theta": hf_config["rope_local_base_freq"]} | sliding
  length = hf_config["max_position_embeddings"]
  return {
    "rope": config_json.parse_rope(full, length),
    "local_rope": config_json.parse_rope(sliding, length),
  }


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "gemma3_text"."""
  pattern = (
    hf_config["sliding_window_pattern"]
    or hf_config["_sliding_window_pattern"]
    or 6
  )  # every sixth layer is global
  layers = range(1, hf_config["num_hidden_layers"] + 1)
  default = [layer % pattern != 0 for layer in layers]
  return TransformerConfig(
    **gemma2.common(hf_config),
    **config_json.window(hf_config, hf_config["sliding_window"], default),
    **_ropes(hf_config),
    qk_norm=True,
  )
