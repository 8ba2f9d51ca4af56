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
    **config_json.ropes_by_layer_type(
      hf_config, hf_config["rope_local_base_freq"]
    ),
    qk_norm=True,
  )
