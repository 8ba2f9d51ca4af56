"""The text models of qwen3_5_moe: Hugging Face's configuration and names."""

from typing import Any

from grpojax.models.config import TransformerConfig
from grpojax.models.families import qwen3_5, qwen3_moe

KEYS = (
  qwen3_5.KEYS
  | {
    path: qwen3_moe.KEYS[path] for path in qwen3_moe.KEYS if "/expert_" in path
  }
  | {
    f"layers/{name}": (f"model.layers.{{layer}}.mlp.{hf_name}.weight", True)
    for name, hf_name in (
      ("router", "gate"),
      ("gate", "shared_expert.gate_proj"),
      ("up", "shared_expert.up_proj"),
      ("down", "shared_expert.down_proj"),
      ("shared_gate", "shared_expert_gate"),
    )
  }
)
READ = qwen3_5.READ | {
  "num_key_value_heads": 2,
  "moe_intermediate_size": 512,
  "shared_expert_intermediate_size": 512,
  "num_experts_per_tok": 8,
  "num_experts": 256,
}
FIXED = qwen3_5.FIXED | {"decoder_sparse_step": 1, "norm_topk_prob": True}
UNUSED = qwen3_5.UNUSED | {"output_router_logits", "router_aux_loss_coef"}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "qwen3_5_moe_text"."""
  return qwen3_5.config(
    hf_config | {"intermediate_size": hf_config["moe_intermediate_size"]},
    experts=hf_config["num_experts"],
    experts_per_token=hf_config["num_experts_per_tok"],
    normalize_experts=True,
    shared_mlp=hf_config["shared_expert_intermediate_size"],
  )
