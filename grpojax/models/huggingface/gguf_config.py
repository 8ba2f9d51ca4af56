"""GGUF's metadata as a config.json, and its tensors by Hugging Face's names.

As in config.json, each key of the architecture is read, must have one value, or
does not change what the model computes; any other is refused by its name. What
GGUF does not say is as llama.cpp computes it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from grpojax.models.huggingface.gguf_file import File, Tensor, library
from grpojax.models.rope import Rope, frequencies

ARCHITECTURES = {
  "llama": ("llama", "LlamaForCausalLM"),  # Mistral's too
  "qwen2": ("qwen2", "Qwen2ForCausalLM"),
  "qwen3": ("qwen3", "Qwen3ForCausalLM"),
  "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""Model type and class of transformers, by general.architecture."""

# GGUF's keys, below the architecture's name -> those of config.json.
_READ = {
  "embedding_length": "hidden_size",
  "block_count": "num_hidden_layers",
  "feed_forward_length": "intermediate_size",
  "context_length": "max_position_embeddings",
  "attention.head_count": "num_attention_heads",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
  "attention.head_count_kv": "num_key_value_heads",
  "attention.key_length": "head_dim",
  "rope.freq_base": "rope_theta",
}
_EXPERTS = {
  "expert_count": "num_experts",
  "expert_used_count": "num_experts_per_tok",
  "expert_feed_forward_length": "moe_intermediate_size",
}
_SCALING = ("rope.scaling.type", "rope.scaling.factor")
_UNUSED = ("rope.scaling.finetuned",)
_FACTORS = "rope_freqs.weight"  # by which frequencies are divided
ID = "tokenizer.ggml.{}_token_id"
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message


def architecture(file: File) -> str:
  """Returns the architecture of a file, one of `ARCHITECTURES`.

  Raises:
    ValueError: another one, a part of a model, or no model.
  """
  name = file.metadata.get("general.architecture")
  if not isinstance(name, str) or name not in ARCHITECTURES:
    raise ValueError(
      f"{file.path} has the architecture {name!r:.80}; of .gguf files these "
      f"are read: {', '.join(ARCHITECTURES)}. For others get the model as a "
      "Hugging Face directory"
    )
  kind = file.metadata.get("general.type", "model")
  if kind != "model" or file.metadata.get("split.count", 1) not in (0, 1):
    raise ValueError(
      f"{file.path} is no whole model (general.type, split.count): join its "
      "parts with llama-gguf-split --merge"
    )
  return name


def to_hf_config(file: File) -> dict[str, Any]:
  """Returns the config.json of a file's model.

  Raises:
    ValueError: an architecture, a key or a value that is not known.
  """
  name = architecture(file)
  prefix = f"{name}."
  experts = name == "qwen3moe"
  required = _READ | (_EXPERTS if experts else {})
  values = _values(file, prefix, required)
  model_type, architecture_class = ARCHITECTURES[name]
  config = {
    "architectures": [architecture_class],
    "model_type": model_type,
    "vocab_size": _vocabulary(file),
    "num_key_value_heads": values["attention.head_count"],
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": "output.weight" not in file.tensors,
  }
  names = required | _OPTIONAL
  config |= {names[key]: values[key] for key in names if key in values}
  if experts:
    config["norm_topk_prob"] = True  # always in llama.cpp
  if name != "qwen2":  # which has the same ones always
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
  if name == "llama":
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
  head_dim = config.get("head_dim") or (
    config["hidden_size"] // config["num_attention_heads"]
  )
  fixed = {
    "vocab_size": config["vocab_size"],
    "attention.value_length": head_dim,
    "rope.dimension_count": head_dim,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
  }
  for key in sorted(values.keys() - names.keys() - {*_SCALING, *_UNUSED}):
    if key not in fixed or values[key] != fixed[key]:
      known = f"only {fixed[key]!r} is" if key in fixed else "which is not"
      raise ValueError(
        f"{file.path} has {prefix}{key}={values[key]!r:.80}; {known} known: "
        "get the model as a Hugging Face directory"
      )
  scaling = _rope_scaling(file, values, config["rope_theta"], head_dim)
  return config | scaling | token_ids(file)


def _values(file: File, prefix: str, required: Iterable[str]) -> dict[str, Any]:
  """Returns the values of an architecture's keys, without their prefix."""
  values = {
    key.removeprefix(prefix): value
    for key, value in file.metadata.items()
    if key.startswith(prefix)
  }
  lacking = [prefix + key for key in required if key not in values]
  if lacking:
    raise ValueError(f"{file.path} lacks {', '.join(lacking)}")
  for key, value in values.items():
    is_size = key in (*required, *_OPTIONAL)
    is_number = type(value) in (int, float) and 0 < value < 2**31
    # An array has a number for each layer, say.
    if isinstance(value, (list, np.ndarray)) or (is_size and not is_number):
      raise ValueError(
        f"{file.path} has {prefix}{key}={value!r:.80}: it must be one number"
      )
  return values


def _vocabulary(file: File) -> int:
  """Returns the rows of the embedding."""
  if "token_embd.weight" not in file.tensors:
    raise ValueError(f"{file.path} has no tensor token_embd.weight")
  return file.tensors["token_embd.weight"].shape[0]


def _rope_scaling(
  file: File, values: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any]:
  """Returns config.json's rope_scaling: none, linear, or Llama 3's.

  Of Llama 3's rule a file has only what comes of it, a factor for each
  frequency. They must be those of the rule with the numbers of Llama 3.1 to
  3.3; of these `factor` alone differs, and is the largest.
  """
  kind, factor = (values.get(key) for key in _SCALING)
  factors = file.tensors.get(_FACTORS)
  rope = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  if kind in (None, "none") and factor is None:
    if factors is None:
      return {}
    if factors.shape == (head_dim // 2,):
      divisors = factors.rows(0, head_dim // 2)
      rope["factor"] = max(1.0, float(divisors.max()))
      plain = frequencies(Rope(theta), head_dim)
      ruled = frequencies(Rope(theta, **rope, original_length=8192), head_dim)
      if np.allclose(divisors * ruled, plain, rtol=1e-4, atol=0.0):
        rope |= {"original_max_position_embeddings": 8192}
        return {"rope_scaling": {"rope_type": "llama3"} | rope}
  elif kind == "linear" and factor is not None and factors is None:
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
  raise ValueError(
    f"{file.path} scales its rotary frequencies in a way that is not known "
    f"({_SCALING[0]}={kind!r:.80}, factor {factor!r:.80}, {_FACTORS} "
    f"{'other than' if factors else 'not'} Llama 3.1's): get the model as a "
    "Hugging Face directory"
  )


def token_ids(file: File) -> dict[str, Any]:
  """Returns bos_, eos_ (a list) and pad_token_id, those that a file names."""
  named = {
    name: file.metadata[ID.format(name)]
    for name in ("bos", "padding", *_ENDS)
    if ID.format(name) in file.metadata
  }
  ends = list(dict.fromkeys(named[x] for x in _ENDS if x in named))
  ids = {"bos": named.get("bos"), "pad": named.get("padding"), "eos": ends}
  return {f"{k}_token_id": v for k, v in ids.items() if v not in (None, [])}


def tensors(file: File, names: Iterable[str]) -> dict[str, Tensor]:
  """Returns a file's tensors by these Hugging Face names; others by their own.

  Experts' matrices, which are stacked in GGUF, are tensors of their own.
  """
  gguf, name = library(), architecture(file)
  kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
  names_there = gguf.get_tensor_name_map(kind, 1)  # of layer 0
  value = lambda key: file.metadata.get(f"{name}.{key}")
  heads = value("attention.head_count")
  heads = {"attn_q": heads, "attn_k": value("attention.head_count_kv") or heads}
  renamed, used = {}, {_FACTORS}  # those are in the config
  for ours in names:
    layer = re.search(r"layers\.(\d+)\.", ours)
    expert = re.search(r"experts\.(\d+)\.", ours)
    general = re.sub(r"experts\.\d+", "experts", ours)
    general = re.sub(r"layers\.\d+", "layers.0", general)
    key = names_there.get_name(general, try_suffixes=(".weight", ".bias")) or ""
    if layer:
      key = key.replace("blk.0.", f"blk.{layer[1]}.")
    tensor = file.tensors.get(key)
    if expert and tensor and tensor.shape[0] == value("expert_count"):
      tensor = tensor.part(int(expert[1]))
    if tensor:
      part = key.split(".")[-2]
      swapped = heads.get(part, 0) if name == "llama" else 0
      renamed[ours] = tensor._replace(heads=swapped)
      used.add(key)
  return renamed | {k: v for k, v in file.tensors.items() if k not in used}
