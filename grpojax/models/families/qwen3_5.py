"""The text models of qwen3_5: Hugging Face's configuration and names."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import qwen3
from grpojax.models.gated_delta import Sizes

KEYS = qwen3.KEYS | {
  f"layers/linear_{name}": (f"model.layers.{{layer}}.linear_attn.{hf_name}", t)
  for name, hf_name, t in (
    ("qkv", "in_proj_qkv.weight", True),
    ("z", "in_proj_z.weight", True),
    ("b", "in_proj_b.weight", True),
    ("a", "in_proj_a.weight", True),
    ("a_bias", "dt_bias", False),
    ("rate_bias", "A_log", False),
    ("conv", "conv1d.weight", False),
    ("norm", "norm.weight", False),
    ("o", "out_proj.weight", True),
  )
}
READ = config_json.READ | {
  "num_key_value_heads": 4,
  "head_dim": 256,
  "attention_bias": False,
  "layer_types": None,
  "full_attention_interval": 4,
  "partial_rotary_factor": 0.25,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
}
LAYER_TYPES = ("full_attention", "linear_attention")
FIXED = qwen3.FIXED | {
  "attn_output_gate": True,
  "hidden_act": "silu",  # also the activation after the convolution
  "mamba_ssm_dtype": "float32",
  "mlp_only_layers": [],
}
# Prediction of several tokens is not read. Rotary sections are of images.
UNUSED = {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}


def _rope(hf_config: dict[str, Any]):
  # Text has the same position in all sections.
  sections = {"mrope_section", "mrope_interleaved"}
  ropes = {
    name: {k: x for k, x in hf_config[name].items() if k not in sections}
    for name in ("rope_scaling", "rope_parameters")
    if hf_config[name]
  }
  share = config_json.number(
    "partial_rotary_factor", hf_config["partial_rotary_factor"], 0.0
  )
  return config_json.rope(hf_config | ropes, share)


def config(hf_config: dict[str, Any], **changes: Any) -> TransformerConfig:
  """Reads a complete config.json of model_type "qwen3_5_text"."""
  interval = hf_config["full_attention_interval"]
  layers = range(1, hf_config["num_hidden_layers"] + 1)
  linear_layers = tuple(layer % interval != 0 for layer in layers)
  if kinds := hf_config["layer_types"]:
    config_json.refuse_others("layer_types", kinds, LAYER_TYPES)
    linear_layers = tuple(kind == "linear_attention" for kind in kinds)
  sizes = Sizes(
    hf_config["linear_num_key_heads"],
    hf_config["linear_num_value_heads"],
    hf_config["linear_key_head_dim"],
    hf_config["linear_value_head_dim"],
    hf_config["linear_conv_kernel_dim"],
  )
  return TransformerConfig(
    **config_json.common(hf_config),
    rope=_rope(hf_config),
    qk_norm=True,
    norm_offset=True,
    attention_gate=True,
    linear=sizes,
    linear_layers=linear_layers,
    **changes,
  )
