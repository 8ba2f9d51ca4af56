"""Reads and writes Hugging Face model directories."""

import collections
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpojax.core.types import LM, Params
from grpojax.models import config_json
from grpojax.models.config import TransformerConfig, check, parameter_shapes
from grpojax.models.families import (
  gemma,
  gemma2,
  gemma3,
  granite,
  granitemoehybrid,
  llama,
  ministral3,
  mistral,
  mixtral,
  olmo2,
  olmo3,
  phi3,
  qwen2,
  qwen3,
  qwen3_5,
  qwen3_moe,
  smollm3,
)
from grpojax.models.huggingface import gguf_file, weights, weights_out
from grpojax.models.transformer import transformer

FAMILIES = {
  "llama": llama,
  "qwen2": qwen2,
  "qwen3": qwen3,
  "mistral": mistral,
  "ministral": mistral,
  "ministral3": ministral3,
  "gemma": gemma,
  "gemma2": gemma2,
  "gemma3_text": gemma3,
  "smollm3": smollm3,
  "olmo2": olmo2,
  "olmo3": olmo3,
  "granite": granite,
  "granitemoehybrid": granitemoehybrid,
  "phi3": phi3,
  "qwen3_moe": qwen3_moe,
  "mixtral": mixtral,
  "qwen3_5_text": qwen3_5,
}
"""Module of each family, by config.json's model_type.

A family is a module that has

- `KEYS`: `(stored name, transposed)` of each parameter, by its path in
  `config.parameter_shapes`. The name holds "{layer}" and "{expert}" if stored
  by layer and by expert; `transposed` is True if the file has [out, in], like
  PyTorch's Linear. Matrices with the same name are parts of one stored matrix,
  joined along `out` in the order of `KEYS`. Names that no model uses are
  allowed;
- `READ`: keys to read, with transformers' defaults;
- `FIXED` (optional): keys with a single supported value;
- `UNUSED` (optional): keys without effect on grpojax;
- `config(hf_config) -> TransformerConfig` for a config.json checked against
  these keys by `config_json.complete`.

Parameter names are also used in `config.init`, `models.sharding.RULES` (every
matrix needs a rule), `lora.PROJECTIONS` (matrices of `block._project`, and
experts), and `passes.cast`. tests/models/test_family_contract.py checks this.
"""
COMPANIONS = tuple(  # files to copy when a model is saved
  "config.json generation_config.json tokenizer.json tokenizer_config.json "
  "tokenizer.model special_tokens_map.json added_tokens.json vocab.json "
  "merges.txt chat_template.jinja".split()
)
GGUF = "model.gguf"  # link to a GGUF file, in place of safetensors
ADAPTER = "adapter_config.json"
_REFUSED = dict.fromkeys(
  ("quantization_config", "quantization", "compression_config"),
  "quantized weights are not supported; get the model in bfloat16",
) | {
  "auto_map": "the model has its own code, which is never run here: get the "
  "plain base model or, if transformers' own class computes the same, remove "
  "auto_map in a copy of the directory"
}
ASSETS = pathlib.Path(__file__).parents[2] / "assets"


def exists(path: str | pathlib.Path) -> bool:
  """Returns True if `path` exists or is the name of a bundled model."""
  return os.path.lexists(path) or (ASSETS / path).is_dir()


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """Returns a model's directory, given its path or a bundled model's name."""
  path = pathlib.Path(path)
  for directory in (path, ASSETS / path):
    if (directory / ADAPTER).is_file():
      adapter = weights.read_json(directory / ADAPTER)
      base = adapter.get("base_model_name_or_path")
      raise ValueError(
        f"{directory} holds a PEFT adapter, which is not read: give its base "
        f"model, {base!r:.200}, or a merged model (merge_and_unload in peft)"
      )
    # A run directory has a config.json, too, but it has no model_type.
    file = directory / "config.json"
    if file.is_file() and "model_type" in weights.read_json(file):
      _check_links(directory)
      return directory
  names = sorted(p.parent.name for p in ASSETS.glob("*/config.json"))
  raise ValueError(
    f"no model at {str(path)!r}: give a directory with config.json and "
    f"model.safetensors, a .gguf file, the name of a bundled model "
    f"({', '.join(names)}), or ORG/NAME of the Hugging Face Hub"
  )


def _check_links(directory: pathlib.Path) -> None:
  """Raises ValueError if a model's file is a link to a file of another name.

  The files are copied to trained models, so such a link could publish a secret.
  Links in the Hub's cache are allowed.
  """
  for name in COMPANIONS:
    path = directory / name
    target = pathlib.Path(os.path.realpath(path))
    folder = target.parent.name == "blobs" and directory.resolve().parent.name
    if path.is_symlink() and target.name != name and folder != "snapshots":
      raise ValueError(f"{path} is a link to another file: copy {target} there")


def read_config(
  path: str | os.PathLike, ignore_keys: Sequence[str] = ()
) -> dict[str, Any]:
  """Reads the text model of a config.json (or a directory's).

  `ignore_keys` are left out.
  """
  file = pathlib.Path(path)
  if not os.path.isfile(file):
    file = resolve(path) / "config.json"
  hf_config = config_json.text_part(weights.read_json(file))
  if not ignore_keys:
    return hf_config
  return config_json.without_keys(hf_config, ignore_keys, _family(hf_config))


def _family(hf_config: dict[str, Any]):
  kind = hf_config.get("model_type")
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise ValueError(
      f"model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}"
    )
  return FAMILIES[kind]


def to_transformer_config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Converts a config.json to our configuration; ValueError if unsupported."""
  hf_config = config_json.text_part(hf_config)
  family = _family(hf_config)
  known = getattr(family, "FIXED", {})
  for name, reason in _REFUSED.items():
    if hf_config.get(name) and hf_config[name] != known.get(name):
      raise ValueError(f"config.json has {name}: {reason}")
  try:
    config = family.config(config_json.complete(hf_config, family))
  except KeyError as error:
    raise ValueError(f"config.json lacks {error}") from error
  except (AttributeError, TypeError) as error:
    raise ValueError(f"config.json has a misplaced value: {error}") from error
  check(config)
  return config


def layout(hf_config: dict[str, Any]) -> dict[str, weights.Leaf]:
  """Returns the stored tensors that make up each of our arrays, by its path."""
  leaves = {}
  hf_config = config_json.text_part(hf_config)
  config = to_transformer_config(hf_config)
  shapes = flatten_dict(parameter_shapes(config), sep="/")
  keys = _family(hf_config).KEYS
  rows = collections.Counter()  # of each stored name, over all its parts
  first = {}
  for path in keys:
    if path in shapes:
      first[path] = rows[keys[path][0]]
      rows[keys[path][0]] += shapes[path][-1]
  for path, shape in sorted(shapes.items()):
    name, transposed = keys[path]
    part = (first[path], rows[name]) if rows[name] > shape[-1] else None
    axes = [axis for axis in ("layer", "expert") if f"{{{axis}}}" in name]
    numbers = [range(size) for size in shape[: len(axes)]]
    if axes:
      numbers[0] = config.layers_with(path.removeprefix("layers/"))
    names = tuple(
      name.format(**dict(zip(axes, index, strict=True)))
      for index in itertools.product(*numbers)
    )
    leaves[path] = weights.Leaf(names, shape, len(axes), transposed, part)
  return leaves


def abstract_params(hf_config: dict[str, Any], dtype=jnp.float32) -> Params:
  """Returns shapes and dtypes of a model's parameters."""
  leaves = layout(hf_config).items()
  shapes = {p: jax.ShapeDtypeStruct(x.shape, dtype) for p, x in leaves}
  return unflatten_dict(shapes, sep="/")


def load_params(
  path: str | pathlib.Path,
  dtype=jnp.float32,
  shardings: Any = None,
  ignore_keys: Sequence[str] = (),
) -> Params:
  """Reads the weights of a model directory.

  `shardings` is a tree of `jax.sharding.Sharding`, or a function `(abstract
  params) -> tree`; None is the default device. ValueError for damaged files,
  and for weights that are not finite or do not fit config.json.
  """
  directory = resolve(path)
  hf_config = read_config(directory, ignore_keys)
  leaves = layout(hf_config)
  file = directory / GGUF
  others = (weights.SINGLE, weights.INDEX)
  if file.is_symlink() and not any((directory / x).is_file() for x in others):
    names = [name for leaf in leaves.values() for name in leaf.names]
    tensors = gguf_file.find(file, hf_config, names)
  else:
    tensors = weights.find(directory)
    stored = weights.read_json(directory / "config.json")
    if "text_config" in stored or stored.get("model_type") == "qwen3_5_text":
      tensors = weights.text_part(tensors)
  # Old exporters stored rotary frequencies, which follow from config.json.
  surplus = "rotary_emb.inv_freq"
  needed = {n: x for n, x in tensors.items() if not n.endswith(surplus)}
  config = to_transformer_config(hf_config)
  head = needed.pop("lm_head.weight", None) if config.tied else None
  weights.check(directory, leaves, needed)
  embedding = needed[leaves["embed"].names[0]]
  if head and not config.labels and not weights.equal(head, embedding):
    raise ValueError(
      f"lm_head.weight in {directory} differs from the embedding, but "
      "config.json ties them: set tie_word_embeddings to false in a copy of "
      "the directory, or merge the adapter again with tied weights"
    )
  if callable(shardings):
    shardings = shardings(abstract_params(hf_config, dtype))
  by_path = dict.fromkeys(leaves)
  if shardings is not None:
    by_path = flatten_dict(shardings, sep="/")
  # Read large arrays first, while there is little else in memory.
  order = sorted(leaves, key=lambda p: math.prod(leaves[p].shape), reverse=True)
  flat = {p: weights.read(leaves[p], tensors, dtype, by_path[p]) for p in order}
  return unflatten_dict({p: flat[p] for p in leaves}, sep="/")


def load(
  path: str | pathlib.Path,
  *,
  dtype=jnp.float32,
  param_dtype=jnp.float32,
  shardings: Any = None,
  ignore_keys: Sequence[str] = (),
) -> tuple[LM, Params]:
  """Reads a model directory; returns its `LM` and its parameters.

  `dtype` is for computation, `param_dtype` for parameters; see `load_params`.
  """
  config = to_transformer_config(read_config(path, ignore_keys))
  lm = transformer(config, dtype=dtype)
  return lm, load_params(path, param_dtype, shardings, ignore_keys)


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the files of a model directory except its weights."""
  for name in COMPANIONS:
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)
  path = target / "tokenizer_config.json"
  if path.is_file():  # transformers 4 knows another class name
    text = path.read_text(encoding="utf-8")
    text = text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    path.write_text(text, encoding="utf-8")


def save(
  path: str | pathlib.Path,
  params: Params,
  source: str | pathlib.Path,
  *,
  dtype=None,
  max_shard_size: int = 5 * 10**9,
  ignore_keys: Sequence[str] = (),
) -> None:
  """Writes a model directory that `load` and transformers read.

  All processes must call it. The configuration (without `ignore_keys`) and the
  tokenizer are copied from `source`. The directory appears when all its files
  are written; weight files have at most `max_shard_size` bytes. `dtype` is the
  dtype to store; None keeps each array's. ValueError if `path` exists, or if
  the shapes of parameters do not match `source`.
  """
  source = resolve(source)
  hf_config = read_config(source, ignore_keys)
  flat = flatten_dict(params, sep="/")
  leaves = layout(hf_config)
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  if {name: tuple(array.shape) for name, array in flat.items()} != shapes:
    raise ValueError(f"parameters do not fit {source}: use their base model")
  stored = str(np.dtype(dtype or flat[next(iter(leaves))].dtype))
  hf_config |= {"dtype": stored, "torch_dtype": stored}  # transformers 5 and 4
  hf_config.pop("auto_map", None)  # its files are not copied
  if jax.process_index():
    weights_out.follow(leaves, flat)
    return
  text = json.dumps(hf_config, indent=2) + "\n"
  with weights_out.new_directory(path) as partial:
    copy_files(source, partial)
    (partial / "config.json").write_text(text)
    weights_out.write(partial, leaves, flat, dtype, max_shard_size)


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
  """Writes the config.json of a new Llama decoder with tied embeddings."""
  hf_config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": vocab_size,
    "hidden_size": width,
    "intermediate_size": mlp,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "pad_token_id": pad_id,
    "eos_token_id": eos_id,
  }
  to_transformer_config(hf_config)  # raises if invalid
  pathlib.Path(path, "config.json").write_text(json.dumps(hf_config, indent=2))
