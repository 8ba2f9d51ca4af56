"""The mixtral family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import mistral

KEYS = mistral.KEYS | {
  f"layers/{name}": (
    f"model.layers.{{layer}}.block_sparse_moe.{hf_name}.weight",
    True,
  )
  for name, hf_name in (
    ("router", "gate"),
    ("expert_gate", "experts.{expert}.w1"),
    ("expert_up", "experts.{expert}.w3"),
    ("expert_down", "experts.{expert}.w2"),
  )
}
READ = mistral.READ | {
  "rms_norm_eps": 1e-5,
  "rope_theta": 1_000_000.0,
  "sliding_window": None,
  "num_local_experts": 8,
  "num_experts_per_tok": 2,
}
FIXED = {"router_jitter_noise": 0.0}
UNUSED = {"output_router_logits", "router_aux_loss_coef"}  # for training


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "mixtral"."""
  return TransformerConfig(
    **config_json.common(hf_config),
    **mistral.window(hf_config),
    rope=config_json.rope(hf_config),
    experts=hf_config["num_local_experts"],
    experts_per_token=hf_config["num_experts_per_tok"],
    normalize_experts=True,
  )
