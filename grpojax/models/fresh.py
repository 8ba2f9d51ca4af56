"""The config.json of a new model, to be trained from scratch."""

import json
import os
import pathlib

from grpojax.models import hf


def write_config(
  path: str | os.PathLike,
  *,
  vocab_size: int,
  pad_id: int,
  eos_id: int,
  width: int,
  layers: int,
  heads: int,
  kv_heads: int,
  mlp: int,
) -> None:
  """Writes the config.json of a Llama decoder with tied embeddings.

  Args:
    path: a directory that exists.
    vocab_size: tokens, V.
    pad_id: of the tokenizer.
    eos_id: of the tokenizer.
    width: of the residual stream, D.
    layers: blocks, L.
    heads: query heads, H; each of width / heads.
    kv_heads: key and value heads, K.
    mlp: hidden width of the MLP, F.

  Raises:
    ValueError: widths and heads that do not fit.
  """
  if width % heads:
    raise ValueError(f"width = {width}: must be a multiple of heads = {heads}")
  hf_config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": vocab_size,
    "hidden_size": width,
    "intermediate_size": mlp,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": width // heads,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "pad_token_id": pad_id,
    "eos_token_id": eos_id,
  }
  hf.to_transformer_config(hf_config)
  text = json.dumps(hf_config, indent=2)
  (pathlib.Path(path) / "config.json").write_text(text)
