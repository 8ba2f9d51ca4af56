"""Reads the keys of a Hugging Face config.json that all families share.

Each key is read, has one supported value, or does not change the model. Other
keys are errors unless in `ignore_keys`. Absent keys get transformers' defaults.
"""

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

from grpojax.models.rope import NO_ROTATION, Rope

LAYER_TYPES = ("full_attention", "sliding_attention")
READ = {  # keys that all families read, with transformers' defaults
  "num_key_value_heads": None,
  "head_dim": None,
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "rope_theta": 10_000.0,
  "rope_scaling": None,
  "rope_parameters": None,  # replaces both in transformers 5
  "max_position_embeddings": 8192,
}
ROPE_KINDS = {
  "default": {},
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_length",
  },
  "yarn": {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
  },
}
"""Parameters of each rope_type, and the fields of `Rope` that they set."""
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers' defaults
_SIZES = (
  "vocab_size hidden_size num_hidden_layers num_attention_heads "
  "intermediate_size"
).split()
_OPTIONAL_SIZES = (
  "num_key_value_heads head_dim moe_intermediate_size num_experts "
  "num_local_experts num_experts_per_tok full_attention_interval "
  "linear_num_key_heads linear_num_value_heads linear_key_head_dim "
  "linear_value_head_dim linear_conv_kernel_dim shared_intermediate_size "
  "shared_expert_intermediate_size no_rope_layer_interval"
).split()
_MOST_LAYERS = 2**16  # maximum of layers times experts
_LEAST = dict.fromkeys(("sliding_window", "max_window_layers"), -math.inf)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Numbers that may be null although the default is a number
_NULLABLE = {*_LEAST, *_CAPS, "num_key_value_heads", "head_dim"}
# Numbers of other keys must be positive.
_LEAST |= dict.fromkeys(("rms_norm_eps", "partial_rotary_factor"), 0.0)
_KINDS = {"rope_scaling": dict, "rope_parameters": dict, "layer_types": list}
_LARGEST = 1e30  # maximum of numbers, which become float32
# Keys with a single supported value, unless a family reads or fixes the key.
_FIXED = {
  **dict.fromkeys(
    "attention_dropout embd_pdrop hidden_dropout resid_pdrop".split(), 0.0
  ),
  **dict.fromkeys(
    "attention_bias mlp_bias qkv_bias lm_head_bias use_qk_norm use_mrope "
    "rope_interleaved is_encoder_decoder add_cross_attention "
    "tie_encoder_decoder".split(),
    False,
  ),
  "is_causal": True,
  "partial_rotary_factor": 1.0,
  "num_nextn_predict_layers": 0,
  "shared_expert_intermediate_size": 0,
  "pruned_heads": {},
}
_UNUSED = frozenset(
  # Names and formats; architectures and labels are read in `_labels`.
  "model_type architectures dtype torch_dtype transformers_version "
  "_name_or_path tokenizer_class num_labels id2label label2id problem_type "
  "model_name _commit_hash unsloth_fixed unsloth_version "
  # Training and implementations.
  "initializer_range pretraining_tp use_cache cache_implementation "
  "chunk_size_feed_forward attn_implementation _attn_implementation "
  "_attn_implementation_autoset _attn_implementation_internal "
  "_flash_attn_2_enabled experts_implementation _experts_implementation "
  "torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing "
  "neftune_noise_alpha device_map transformers.js_config "
  # Additional outputs.
  "output_attentions output_hidden_states output_scores return_dict "
  "return_dict_in_generate "
  # Special tokens and generation: generation_config.json has priority.
  "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id "
  "cls_token_id mask_token_id is_decoder prefix max_new_tokens min_new_tokens "
  "decoder_start_token_id forced_bos_token_id forced_eos_token_id "
  "suppress_tokens begin_suppress_tokens bad_words_ids do_sample temperature "
  "top_k top_p typical_p num_beams num_beam_groups num_return_sequences "
  "diversity_penalty early_stopping length_penalty repetition_penalty "
  "no_repeat_ngram_size encoder_no_repeat_ngram_size max_length min_length "
  "exponential_decay_length_penalty remove_invalid_values "
  "task_specific_params finetuning_task".split()
)

# An unknown key that matches one of these may change the model.
_NEVER_IGNORED = re.compile(
  "auto_map|rope|rotary|quant|_size|_dim|num_|_layers"
)


_VISION = (  # keys of config.json beside its text_config
  "text_config vision_config image_token_index image_token_id "
  "multimodal_projector_bias projector_hidden_act spatial_merge_size "
  "vision_feature_layer video_token_id vision_start_token_id "
  "vision_end_token_id"
).split()
_WITH_IMAGES = {  # default model_type of their text_config, as in transformers
  "mistral3": "mistral",
  "ministral3": "mistral",
  "qwen3_5": "qwen3_5_text",
  "qwen3_5_moe": "qwen3_5_moe_text",
}
_TEXT_MODELS = {
  "qwen3_5_text": "Qwen3_5ForCausalLM",
  "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
  "mistral": "MistralForCausalLM",
  "ministral3": "Ministral3ForCausalLM",
}


def text_part(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Returns the config.json of the text model in one that also reads images.

  Keys outside of text_config have priority, as in transformers.
  """
  text = hf_config.get("text_config")
  if hf_config.get("model_type") not in [*_WITH_IMAGES] or not text:
    return hf_config
  if not isinstance(text, dict):
    raise ValueError(f"config.json has text_config={text!r:.40}: use an object")
  kind = text.get("model_type", _WITH_IMAGES[hf_config["model_type"]])
  if kind not in [*_TEXT_MODELS]:
    raise ValueError(f"config.json has model_type={kind!r} in text_config")
  top = {k: x for k, x in hf_config.items() if k not in _VISION}
  top |= {"model_type": kind, "architectures": [_TEXT_MODELS[kind]]}
  return text | top


def _keys(family) -> tuple[dict[str, Any], dict[str, Any], frozenset[str]]:
  """Returns a family's keys: {read: default}, {fixed: value}, and unused."""
  fixed = {key: x for key, x in _FIXED.items() if key not in family.READ}
  fixed |= getattr(family, "FIXED", {})
  return family.READ, fixed, _UNUSED | getattr(family, "UNUSED", set())


def without_keys(
  hf_config: dict[str, Any], ignore_keys: Iterable[str], family
) -> dict[str, Any]:
  """Removes `ignore_keys`; ValueError if one of them may change the model."""
  read, fixed, unused = _keys(family)
  ignored = {key for key in ignore_keys if hf_config.get(key) is not None}
  ignored -= unused
  for key in sorted(ignored):
    if key in {*read, *fixed, *_SIZES} or _NEVER_IGNORED.search(key):
      raise ValueError(
        f"config.json has {key}={hf_config[key]!r:.80}, which can change the "
        f"model: remove {key} from model.ignore_keys"
      )
  return {key: x for key, x in hf_config.items() if key not in ignored}


def complete(hf_config: dict[str, Any], family) -> dict[str, Any]:
  """Checks a config.json and adds defaults; ValueError if unsupported."""
  read, fixed, unused = _keys(family)
  values = {key: x for key, x in hf_config.items() if x is not None}
  for key, only in fixed.items():
    if key in values and values[key] != only:
      raise ValueError(
        f"config.json has {key}={values[key]!r:.80}; only {only!r} is supported"
      )
  known = {*read, *fixed, *_SIZES, *unused}
  if unknown := [key for key in values if key not in known]:
    listed = ", ".join(f"{key}={values[key]!r:.80}" for key in unknown)
    remedy = f"set --config.model.ignore_keys={','.join(unknown)}"
    if any(map(_NEVER_IGNORED.search, unknown)):
      remedy = "remove them from config.json in a copy of the directory"
    raise ValueError(
      f"config.json has {listed}, unknown for "
      f"model_type={hf_config['model_type']!r}: use another model or, if these "
      f"keys do not change the model, {remedy}"
    )
  merged = read | hf_config
  _check_kinds(merged)
  for key in (*_SIZES, *_OPTIONAL_SIZES):
    value = merged.get(key, 1)  # reading an absent key raises
    if key in fixed or key in unused:
      continue
    absent = value is None and key in _OPTIONAL_SIZES
    if not absent and (type(value) is not int or not 0 < value < 2**31):
      raise ValueError(
        f"config.json has {key}={value!r}: use a whole number below 2**31"
      )
  experts = merged.get("num_local_experts") or merged.get("num_experts") or 1
  layers = merged["num_hidden_layers"]
  if layers * experts > _MOST_LAYERS:
    counts = f"{layers} layers with {experts} experts each"
    raise ValueError(f"config.json has {counts}, above {_MOST_LAYERS} in all")
  for key, default in read.items():
    value = merged[key]
    if isinstance(default, bool) and not isinstance(value, bool | None):
      raise ValueError(f"config.json has {key}={value!r}: use true or false")
    if type(default) not in (int, float) or value is None and key in _NULLABLE:
      continue
    number(key, value, _LEAST.get(key, sys.float_info.min))
  return merged


def _check_kinds(merged: dict[str, Any]) -> None:
  """Raises ValueError for values whose default, null, does not tell a type."""
  layers = merged["num_hidden_layers"]
  for key, kind in _KINDS.items():
    value = merged.get(key)
    if value is not None and not isinstance(value, kind):
      name = {dict: "an object", list: "a list"}[kind]
      raise ValueError(f"config.json has {key}={value!r:.40}: use {name}")
  kinds = merged.get("layer_types")
  if kinds is not None and len(kinds) != layers:
    raise ValueError(
      f"config.json has {len(kinds)} layer_types for {layers} layers"
    )
  for key in _CAPS:
    if merged.get(key) is not None:
      number(key, merged[key])


def number(key: str, value: Any, least: float = sys.float_info.min) -> float:
  """Returns `value`; ValueError if it is not a finite number >= `least`."""
  if type(value) not in (int, float) or not least <= value <= _LARGEST:
    stated = f"{key}={value!r:.40}"
    positive = "above 0" if least <= 1e-9 else f"of at least {least}"
    raise ValueError(
      f"config.json has {stated}: use a finite number {positive}"
    )
  return float(value)


def _labels(hf_config: dict[str, Any]) -> int:
  """Returns the number of outputs of a classifier, 0 for a language model."""
  name = (hf_config.get("architectures") or ["ForCausalLM"])[0]
  if name.endswith("ForSequenceClassification"):
    names = hf_config.get("id2label") or {}
    labels = hf_config.get("num_labels") or 2
    return len(names) or int(number("num_labels", labels))
  if not name.endswith("ForCausalLM"):
    raise ValueError(
      f"config.json has the architecture {name}; only ...ForCausalLM and "
      "...ForSequenceClassification are supported"
    )
  return 0


def common(hf_config: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of `TransformerConfig` that all families share."""
  gemma = "hidden_activation" in hf_config
  name = "hidden_activation" if gemma else "hidden_act"
  activations = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
  if hf_config[name] not in list(activations):
    raise ValueError(
      f"config.json has {name}={hf_config[name]!r}; use one of {[*activations]}"
    )
  width, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
  if not hf_config["head_dim"] and width % heads:
    raise ValueError(
      f"config.json needs a head_dim, because hidden_size={width} is not a "
      f"multiple of num_attention_heads={heads}"
    )
  return {
    "vocab_size": hf_config["vocab_size"],
    "width": width,
    "layers": hf_config["num_hidden_layers"],
    "heads": heads,
    "kv_heads": hf_config["num_key_value_heads"] or heads,
    "head_dim": hf_config["head_dim"] or width // heads,
    "mlp": hf_config["intermediate_size"],
    "activation": activations[hf_config[name]],
    "norm_eps": hf_config["rms_norm_eps"],
    "tied": hf_config["tie_word_embeddings"],
    "qkv_bias": bool(hf_config.get("attention_bias")),
    "o_bias": bool(hf_config.get("attention_bias")),
    "mlp_bias": bool(hf_config.get("mlp_bias")),
    "labels": _labels(hf_config),
  }


def window(
  hf_config: dict[str, Any], size: Any, default: list[bool]
) -> dict[str, Any]:
  """Returns `local_layers` and `window`, or {} if all layers are global."""
  local = default
  kinds = hf_config.get("layer_types")
  if kinds is not None:
    refuse_others("layer_types", kinds, LAYER_TYPES)
    local = [kind == "sliding_attention" for kind in kinds]
  if any(local) and (type(size) is not int or not 0 < size < 2**31):
    raise ValueError(
      f"config.json has local layers whose window is {size!r:.40}: check "
      "layer_types, sliding_window and, for qwen, use_sliding_window"
    )
  return {"local_layers": tuple(local), "window": size} if any(local) else {}


def refuse_others(name: str, values: Iterable[str], known) -> None:
  """Raises ValueError if one of `values` is not in `known`."""
  if unknown := ", ".join(sorted(set(values) - set(known))):
    raise ValueError(
      f"config.json has {unknown} in {name}; supported: {', '.join(known)}"
    )


def rope(hf_config: dict[str, Any], share: float | None = None) -> Rope:
  """Reads the rotary embedding, from rope_scaling or (new) rope_parameters."""
  scaling = hf_config["rope_scaling"] or hf_config["rope_parameters"] or {}
  parameters = {"rope_theta": hf_config["rope_theta"]} | scaling
  return parse_rope(parameters, hf_config["max_position_embeddings"], share)


def parse_rope(
  parameters: dict[str, Any], length: int, share: float | None = None
) -> Rope:
  """Reads rope parameters; `length` is the model's number of positions.

  `share` is the default of partial_rotary_factor in a family that reads it.
  """
  values = {k: v for k, v in parameters.items() if v is not None}
  kind = values.pop("type", "default")
  kind = values.pop("rope_type", kind)
  if kind not in list(ROPE_KINDS):
    raise ValueError(
      f"config.json has rope_type={kind!r}; supported: {list(ROPE_KINDS)}"
    )
  # YaRN divides by its logarithm.
  theta = number("rope_theta", values.pop("rope_theta"), 1.0 + 1e-6)
  name = "partial_rotary_factor"
  stated = number(name, values.pop(name, 1 if share is None else share), 0.0)
  if share is None and stated != 1:  # transformers rotates all channels
    raise ValueError(f"config.json has {name}={stated}: only 1 is supported")
  if kind in ("llama3", "yarn"):
    values.setdefault("original_max_position_embeddings", length)
  others = {}
  if kind == "yarn":
    others["truncate"] = values.pop("truncate", True)
    if not isinstance(others["truncate"], bool):
      raise ValueError(f"config.json has truncate={others['truncate']!r:.40}")
    values = _YARN | values
    values["attention_factor"] = _yarn_attention(values)
  fields = ROPE_KINDS[kind]
  refuse_others(f"the rope parameters of type {kind!r}", values, fields)
  if lacking := ", ".join(sorted(set(fields) - set(values))):
    raise ValueError(f"the rope parameters in config.json lack {lacking}")
  numbers = {fields[name]: number(name, x) for name, x in values.items()}
  return Rope(theta, share=stated, **numbers, **others)


def _yarn_attention(values: dict[str, Any]) -> float:
  """Removes YaRN's mscale keys; returns the factor of cosines and sines."""
  scales = [values.pop(name, 0.0) for name in ("mscale", "mscale_all_dim")]
  if "attention_factor" in values:
    return values["attention_factor"]
  factor = max(number("factor", values["factor"]), 1.0)
  of = lambda scale: 0.1 * number("mscale", scale) * math.log(factor) + 1.0
  return of(scales[0]) / of(scales[1]) if all(scales) else of(1.0)


def ropes_by_layer_type(
  hf_config: dict[str, Any], local_theta: int | float
) -> dict[str, Any]:
  """Reads the rotary embeddings of global and of local layers.

  `local_theta` is the base of local layers unless rope_parameters has one.
  """
  by_type = hf_config["rope_parameters"] or {}
  refuse_others("rope_parameters", by_type, LAYER_TYPES)
  full, sliding = (by_type.get(kind) or {} for kind in LAYER_TYPES)
  full = {"rope_theta": hf_config["rope_theta"]} | full
  full |= hf_config["rope_scaling"] or {}  # not for local layers
  sliding = {"rope_theta": local_theta} | sliding
  length = hf_config["max_position_embeddings"]
  return {
    "rope": parse_rope(full, length),
    "local_rope": parse_rope(sliding, length),
  }


def rotated_layers(
  rope: Rope, rotated: list[bool], windows: dict[str, Any]
) -> dict[str, Any]:
  """Returns the fields for windows and ropes if only some layers have RoPE.

  `windows` are the fields from `window`. Either all layers with a window have
  RoPE or none has, and so for layers without a window; otherwise ValueError.
  """
  without = tuple(not x for x in rotated)
  local = windows.get("local_layers", without)
  kinds = set(zip(local, rotated, strict=True))
  ropes = {is_local: rope if x else NO_ROTATION for is_local, x in kinds}
  if len(ropes) < len(kinds):
    raise ValueError(
      "config.json has layers with and without RoPE of the same layer_types: "
      "only one of the two kinds of layers may lack RoPE"
    )
  if len(ropes) == 1:
    return windows | {"rope": next(iter(ropes.values()))}
  fields = {"local_layers": local, "rope": ropes[False]}
  return windows | fields | {"local_rope": ropes[True]}
