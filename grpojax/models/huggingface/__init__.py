"""Hugging Face model directories: configuration and weights, in and out."""

import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpojax.core.types import LM, Params
from grpojax.models.families import (
  gemma2,
  gemma3,
  llama,
  mistral,
  qwen2,
  qwen3,
  qwen3_moe,
)
from grpojax.models.huggingface import (
  file_checksums,
  gguf_file,
  weights,
  weights_out,
)
from grpojax.models.transformer import (
  TransformerConfig,
  parameter_shapes,
  transformer,
)

FAMILIES = {
  "llama": llama,
  "qwen2": qwen2,
  "qwen3": qwen3,
  "mistral": mistral,
  "gemma2": gemma2,
  "gemma3_text": gemma3,
  "qwen3_moe": qwen3_moe,
}
"""Module of each family, by config.json's model_type.

A family is a module here that has

- `KEYS`: for each parameter of ours, by its path in `config.parameter_shapes`,
  `(stored name, transposed)`. The name holds "{layer}" for what is stored by
  layer, and "{expert}" too for what is stored by expert. A matrix of ours is
  [in, out]; `transposed` says that the file has [out, in], as PyTorch's Linear
  does. Names that a model does not have do no harm.
- `config(hf_config) -> TransformerConfig`, which passes config.json through
  `config_json.complete` with
  - `READ`: the keys that it reads, with transformers' defaults for absent ones;
  - `FIXED` (optional): keys that change what the model computes, with the one
    value that is implemented;
  - `UNUSED` (optional): keys that change nothing here.

A parameter that no other family has is known by its name to three more:

- `config.init`: "norm" in a name means ones (zeros with `norm_offset`), "bias"
  zeros, and any other name random normal values;
- `models.sharding.RULES`: every matrix needs a rule, or is refused;
- `lora.PROJECTIONS`: what LoRA can adapt, namely what `block` multiplies by in
  `_project`, and experts; not their router.

A parameter named "router" stays float32 whatever the model computes in
(`passes.cast`). tests/models/test_family_contract.py checks all this.
"""
COMPANIONS = (
  "config.json",
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
)
GGUF = "model.gguf"
"""Name of a link, in the place of safetensors, that leads to a GGUF file."""
_REFUSED = {
  "auto_map": "the model comes with code of its own, which is never run here; "
  "where it is a plain model of a supported family, remove auto_map",
  "quantization_config": "quantized weights are not read; get the model in "
  "bfloat16, float16 or float32",
}
ASSETS = pathlib.Path(__file__).parents[2] / "assets"


def exists(path: str | pathlib.Path) -> bool:
  """Returns True where a path, or an embedded model of that name, exists."""
  return os.path.lexists(path) or (ASSETS / path).is_dir()


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the directory of a path, or of an embedded model's name.

  Raises:
    ValueError: neither exists, or it holds no model's config.json, or links.
  """
  path = pathlib.Path(path)
  for directory in (path, ASSETS / path):
    # A run has a config.json too, but of another kind.
    file = directory / "config.json"
    if file.is_file() and "model_type" in weights.read_json(file):
      _check_links(directory)
      return directory
  names = sorted(p.parent.name for p in ASSETS.glob("*/config.json"))
  embedded = ", ".join(names)
  raise ValueError(
    f"no model at {str(path)!r}: give a directory that holds config.json and "
    f"model.safetensors, a .gguf file, the name of an embedded model "
    f"({embedded}), or ORG/NAME of the Hugging Face Hub"
  )


def _check_links(directory: pathlib.Path) -> None:
  """Refuses a directory of which a file is a link to something else.

  They are copied beside trained weights, which may be published: secrets would
  go with them. Links to files of the same name, and the Hub's to blobs, stay.
  """
  for name in COMPANIONS:
    path = directory / name
    target = pathlib.Path(os.path.realpath(path))
    in_cache = target.parent.name == "blobs" and directory.resolve().parent.name
    if path.is_symlink() and target.name != name and in_cache != "snapshots":
      raise ValueError(f"{path} is a link to another file, {target}: copy it")


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
  """Reads the config.json of a model directory, as it stands."""
  return weights.read_json(resolve(path) / "config.json")


def _family(hf_config: dict[str, Any]):
  kind = hf_config.get("model_type")
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise ValueError(
      f"model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}"
    )
  return FAMILIES[kind]


def to_transformer_config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Returns our view of a config.json.

  Raises:
    ValueError: an architecture or a value that is not supported.
  """
  for name, reason in _REFUSED.items():
    if hf_config.get(name):
      raise ValueError(f"config.json has {name}: {reason}")
  try:
    return _family(hf_config).config(hf_config)
  except KeyError as error:
    raise ValueError(f"config.json lacks {error}") from error
  except (AttributeError, TypeError) as error:
    raise ValueError(f"config.json has a misplaced value: {error}") from error


def layout(hf_config: dict[str, Any]) -> dict[str, weights.Leaf]:
  """Returns the stored tensors of each array of a model, by our path."""
  config = to_transformer_config(hf_config)
  shapes = flatten_dict(parameter_shapes(config), sep="/")
  keys, leaves = _family(hf_config).KEYS, {}
  for path, shape in sorted(shapes.items()):
    name, transposed = keys[path]
    axes = [axis for axis in ("layer", "expert") if f"{{{axis}}}" in name]
    names = tuple(
      name.format(**dict(zip(axes, index, strict=True)))
      for index in np.ndindex(shape[: len(axes)])
    )
    leaves[path] = weights.Leaf(names, shape, len(axes), transposed)
  return leaves


def abstract_params(hf_config: dict[str, Any], dtype=jnp.float32) -> Params:
  """Returns shapes and dtypes of a model's parameters, in our layout."""
  leaves = layout(hf_config).items()
  shapes = {p: jax.ShapeDtypeStruct(x.shape, dtype) for p, x in leaves}
  return unflatten_dict(shapes, sep="/")


def load_params(
  path: str | pathlib.Path, dtype=jnp.float32, shardings: Any = None
) -> Params:
  """Reads a directory's weights into our layout.

  `shardings` has a `jax.sharding.Sharding` for each array: a tree, or a
  function `(abstract params) -> tree`; None is the default device.

  Raises:
    ValueError: damaged files, weights that do not fit config.json (all that is
      missing, surplus or of a wrong shape is listed), or that are not finite.
  """
  directory = resolve(path)
  file_checksums.verify(directory)
  hf_config = read_config(directory)
  leaves = layout(hf_config)
  file, others = directory / GGUF, (weights.SINGLE, weights.INDEX)
  if file.is_symlink() and not any((directory / x).is_file() for x in others):
    names = [name for leaf in leaves.values() for name in leaf.names]
    tensors = gguf_file.find(file, hf_config, names)
  else:
    tensors = weights.find(directory)
  # What old exporters stored though it follows from config.json, and a tied
  # head that was written out a second time.
  surplus = ("rotary_emb.inv_freq",)
  if to_transformer_config(hf_config).tied:
    surplus += ("lm_head.weight",)
  needed = {n: x for n, x in tensors.items() if not n.endswith(surplus)}
  weights.check(directory, leaves, needed)
  if callable(shardings):
    shardings = shardings(abstract_params(hf_config, dtype))
  by_path = dict.fromkeys(leaves)
  if shardings is not None:
    by_path = flatten_dict(shardings, sep="/")
  # The largest first: while it is read, little else is in memory.
  order = sorted(leaves, key=lambda p: math.prod(leaves[p].shape), reverse=True)
  flat = {p: weights.read(leaves[p], tensors, dtype, by_path[p]) for p in order}
  return unflatten_dict({p: flat[p] for p in leaves}, sep="/")


def load(
  path: str | pathlib.Path,
  *,
  dtype=jnp.float32,
  remat: str = "none",
  param_dtype=jnp.float32,
  shardings: Any = None,
) -> tuple[LM, Params]:
  """Reads a model directory: the model's functions and its parameters.

  `dtype` and `remat` are those of `transformer`; `param_dtype`, the type of the
  parameters, and `shardings` are those of `load_params`.

  Raises:
    ValueError: an unsupported architecture, or weights that do not fit.
  """
  config = to_transformer_config(read_config(path))
  lm = transformer(config, dtype=dtype, remat=remat)
  return lm, load_params(path, param_dtype, shardings)


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the files of a model directory besides its weights."""
  for name in COMPANIONS:
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)


def save(
  path: str | pathlib.Path,
  params: Params,
  source: str | pathlib.Path,
  *,
  dtype=None,
  max_shard_size: int = 5 * 10**9,
) -> None:
  """Writes a model directory that `load` and transformers read.

  With several processes, all of them call it, and the first one writes.

  Args:
    path: the directory to make; nothing stands at `path` until all is written.
    params: parameters in our layout, on any devices.
    source: the directory that the model came from; its configuration and
      tokenizer files are copied.
    dtype: type to store; None is that of each array.
    max_shard_size: bytes of a file of weights.

  Raises:
    ValueError: `path` exists already, or the parameters are of another model.
  """
  source = resolve(source)
  hf_config, flat = read_config(source), flatten_dict(params, sep="/")
  leaves = layout(hf_config)
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  if {name: tuple(array.shape) for name, array in flat.items()} != shapes:
    raise ValueError(f"the parameters are not those of a model like {source}")
  stored = str(np.dtype(dtype or flat[next(iter(leaves))].dtype))
  names = [name for name in ("dtype", "torch_dtype") if name in hf_config]
  hf_config |= dict.fromkeys(names, stored)
  if jax.process_index():
    weights_out.follow(leaves, flat)
    return
  text = json.dumps({"dtype": stored} | hf_config, indent=2) + "\n"
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
  """Writes the config.json of a new Llama decoder with tied embeddings.

  Sizes are those of `TransformerConfig`, and `path` is a directory that exists.

  Raises:
    ValueError: widths and heads that do not fit.
  """
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
  to_transformer_config(hf_config)
  text = json.dumps(hf_config, indent=2)
  pathlib.Path(path, "config.json").write_text(text)
