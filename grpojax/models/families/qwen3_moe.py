"""The qwen3_moe family: Hugging Face's configuration and parameter names."""

from typing import Any

from grpojax.models.config import TransformerConfig
from grpojax.models.families import qwen3

KEYS = qwen3.KEYS | {
  f"layers/{name}": (f"model.layers.{{layer}}.mlp.{hf_name}.weight", True)
  for name, hf_name in (
    ("router", "gate"),
    ("expert_gate", "experts.{expert}.gate_proj"),
    ("expert_up", "experts.{expert}.up_proj"),
    ("expert_down", "experts.{expert}.down_proj"),
  )
}
READ = qwen3.READ | {
  "num_key_value_heads": 4,
  "head_dim": None,
  "moe_intermediate_size": 768,
  "num_experts_per_tok": 8,
  "num_experts": 128,
  "num_local_experts": None,  # transformers 5's name for num_experts
  "norm_topk_prob": False,
}
FIXED = qwen3.FIXED | {"decoder_sparse_step": 1, "mlp_only_layers": []}
UNUSED = {"output_router_logits", "router_aux_loss_coef"}  # for training


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "qwen3_moe"."""
  return qwen3.config(
    # Either all layers have a window, or no layer has one.
    hf_config | {"max_window_layers": 0},
    mlp=hf_config["moe_intermediate_size"],
    experts=hf_config["num_local_experts"] or hf_config["num_experts"],
    experts_per_token=hf_config["num_experts_per_tok"],
    normalize_experts=hf_config["norm_topk_prob"],
  )
