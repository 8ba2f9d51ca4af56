"""Hugging Face model directories: configuration and weights, in and out."""

import json
import math
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.core.types import LM, Params
from grpojax.models import (
  gemma2,
  gemma3,
  llama,
  mistral,
  qwen2,
  qwen3,
  qwen3_moe,
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
_REFUSED = {
  "auto_map": "the model comes with code of its own, which is never run here; "
  "where it is a plain model of a supported family, remove auto_map",
  "quantization_config": "quantized weights are not read; get the model in "
  "bfloat16, float16 or float32",
}
ASSETS = pathlib.Path(__file__).parent.parent / "assets"


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """A model directory: a path, or an embedded model's name.

  Raises:
    ValueError: neither exists, or the directory holds no config.json.
  """
  path = pathlib.Path(path)
  for directory in (path, ASSETS / path):
    # A run has a config.json too, but of another kind.
    file = directory / "config.json"
    if file.is_file() and "model_type" in weights.read_json(file):
      return directory
  embedded = ", ".join(
    sorted(p.parent.name for p in ASSETS.glob("*/config.json"))
  )
  raise ValueError(
    f"no model at {str(path)!r}: give a directory that holds config.json and "
    f"model.safetensors, or the name of an embedded model ({embedded})"
  )


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
  """The config.json of a model directory, as it stands."""
  return weights.read_json(resolve(path) / "config.json")


def _family(hf: dict[str, Any]):
  kind = hf.get("model_type")
  if kind not in FAMILIES:
    raise ValueError(
      f"model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}"
    )
  return FAMILIES[kind]


def to_transformer_config(hf: dict[str, Any]) -> TransformerConfig:
  """Our view of a config.json.

  Raises:
    ValueError: an unsupported architecture, or a value that is not supported.
  """
  # What a directory says of code of its own is not run, nor passed over.
  for name, why in _REFUSED.items():
    if hf.get(name):
      raise ValueError(f"config.json has {name}: {why}")
  try:
    return _family(hf).config(hf)
  except KeyError as error:
    raise ValueError(f"config.json lacks {error}") from error


def flatten(tree: Any) -> dict[str, Any]:
  """Leaves by path: `{"layers/q": ..., ...}`; shapes are leaves too."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    tree, is_leaf=lambda x: isinstance(x, tuple)
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in leaves
  }


def nest(flat: dict[str, Any]) -> Params:
  """The nested dict that `flatten` made flat."""
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split("/")
    node = tree
    for name in parents:
      node = node.setdefault(name, {})
    node[last] = leaf
  return tree


def layout(hf: dict[str, Any]) -> dict[str, weights.Leaf]:
  """How each array of a model is stored, by our path.

  Args:
    hf: a config.json.

  Raises:
    ValueError: as `to_transformer_config`.
  """
  shapes = flatten(parameter_shapes(to_transformer_config(hf)))
  keys, leaves = _family(hf).KEYS, {}
  for path, shape in shapes.items():
    name, transposed = keys[path]
    axes = [axis for axis in ("layer", "expert") if f"{{{axis}}}" in name]
    names = tuple(
      name.format(**dict(zip(axes, place, strict=True)))
      for place in np.ndindex(shape[: len(axes)])
    )
    leaves[path] = weights.Leaf(names, shape, len(axes), transposed)
  return leaves


def abstract_params(hf: dict[str, Any], dtype=jnp.float32) -> Params:
  """Shapes and dtypes of a model's parameters, in our layout."""
  return nest(
    {
      path: jax.ShapeDtypeStruct(leaf.shape, dtype)
      for path, leaf in layout(hf).items()
    }
  )


def load_params(
  path: str | pathlib.Path, dtype=jnp.float32, shardings: Any = None
) -> Params:
  """Reads a directory's weights into our layout.

  Args:
    path: directory or embedded name, see `resolve`.
    dtype: of the returned arrays.
    shardings: a `jax.sharding.Sharding` for each of them: a tree, or a function
      `(abstract params) -> tree`. None is the default device.

  Raises:
    ValueError: damaged files, or weights that do not fit config.json: all that
      is missing, surplus or of a wrong shape is listed.
  """
  directory = resolve(path)
  hf = read_config(directory)
  leaves, tensors = layout(hf), weights.find(directory)

  def ignored(name):
    # What old exporters stored though it follows from config.json, and a tied
    # head that was written out a second time.
    tied = to_transformer_config(hf).tied and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")

  weights.check(directory, leaves, tensors, ignored)
  if callable(shardings):
    shardings = shardings(abstract_params(hf, dtype))
  places = dict.fromkeys(leaves) if shardings is None else flatten(shardings)
  # The largest first: while it is read, little else is in memory.
  order = sorted(leaves, key=lambda p: math.prod(leaves[p].shape), reverse=True)
  flat = {p: weights.read(leaves[p], tensors, dtype, places[p]) for p in order}
  return nest({p: flat[p] for p in leaves})


def load(
  path: str | pathlib.Path,
  *,
  dtype=jnp.float32,
  remat: bool = False,
  param_dtype=jnp.float32,
  shardings: Any = None,
) -> tuple[LM, Params]:
  """Reads a model directory: the model's functions and its parameters.

  Args:
    path: directory or embedded name, see `resolve`.
    dtype: of computation, see `transformer`.
    remat: see `transformer`.
    param_dtype: of the parameters.
    shardings: of the parameters, see `load_params`.

  Raises:
    ValueError: an unsupported architecture, or weights that do not fit.
  """
  config = to_transformer_config(read_config(path))
  lm = transformer(config, dtype=dtype, remat=remat)
  return lm, load_params(path, param_dtype, shardings)


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies what a model directory holds besides its weights."""
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

  Args:
    path: the directory to make; nothing stands at `path` until all is written.
    params: parameters in our layout, on any devices.
    source: the directory that the model came from; its configuration,
      generation configuration and tokenizer files are copied.
    dtype: to store; None is that of each array.
    max_shard_size: bytes of a file of weights.

  Raises:
    ValueError: `path` exists already, or the parameters are of another model.
  """
  source = resolve(source)
  hf, flat = read_config(source), flatten(params)
  leaves = layout(hf)
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  if {name: tuple(array.shape) for name, array in flat.items()} != shapes:
    raise ValueError(f"the parameters are not those of a model like {source}")
  stored = str(np.dtype(dtype or next(iter(flat.values())).dtype))
  hf |= {name: stored for name in ("dtype", "torch_dtype") if name in hf}
  text = json.dumps({"dtype": stored} | hf, indent=2) + "\n"
  with weights_out.new_directory(path) as partial:
    copy_files(source, partial)
    (partial / "config.json").write_text(text)
    weights_out.write(partial, leaves, flat, dtype, max_shard_size)
