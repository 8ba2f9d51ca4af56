"""The dense models of granitemoehybrid: Hugging Face's configuration and names.

Models with experts or Mamba layers are refused.
"""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import granite
from grpojax.models.rope import NO_ROTATION

KEYS = granite.KEYS | {
  f"layers/{name}": (f"model.layers.{{layer}}.shared_mlp.{hf_name}", True)
  for name, hf_name in (
    ("gate", "input_linear.weight"),  # gate and up are one matrix
    ("up", "input_linear.weight"),
    ("down", "output_linear.weight"),
  )
}
READ = {k: x for k, x in granite.READ.items() if k != "mlp_bias"} | {
  "shared_intermediate_size": 1024,
  "layer_types": None,
  "position_embedding_type": None,
}
FIXED = {"num_local_experts": 0, "normalization_function": "rmsnorm"}
UNUSED = {  # of experts and Mamba layers
  "num_experts_per_tok",
  "output_router_logits",
  "router_aux_loss_coef",
  "init_method",
  "time_step_limit",
  *(
    f"mamba_{name}"
    for name in "chunk_size conv_bias d_conv d_head d_state expand n_groups "
    "n_heads proj_bias".split()
  ),
}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "granitemoehybrid"."""
  if hf_config.get("num_local_experts") is None:
    raise ValueError("config.json lacks num_local_experts=0: 8 is the default")
  kinds = hf_config["layer_types"] or ["mamba"]
  config_json.refuse_others(
    "layer_types", kinds, ("attention", "full_attention")
  )
  positions = hf_config["position_embedding_type"]
  if positions not in (None, "rope", "nope"):
    raise ValueError(f"config.json has position_embedding_type={positions!r}")
  rope = config_json.rope(hf_config) if positions == "rope" else NO_ROTATION
  mlp = {"mlp": hf_config["shared_intermediate_size"]}
  return TransformerConfig(**granite.common(hf_config) | mlp, rope=rope)
