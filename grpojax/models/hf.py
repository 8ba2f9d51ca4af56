"""Hugging Face model directories: configuration and weights, in and out."""

import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpojax.core.types import LM, Params
from grpojax.models import llama, qwen2
from grpojax.models.transformer import (
  TransformerConfig,
  parameter_shapes,
  transformer,
)

FAMILIES = {"llama": llama, "qwen2": qwen2}
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
ASSETS = pathlib.Path(__file__).parent.parent / "assets"


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """A model directory: a path, a finished run, or an embedded model's name.

  Raises:
    ValueError: neither exists, or the directory holds no config.json.
  """
  path = pathlib.Path(path)
  for directory in (path / "model", path, ASSETS / path):
    # A run has a config.json too, but of another kind, and its model beside it.
    file = directory / "config.json"
    if file.is_file() and "model_type" in json.loads(file.read_text()):
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
  return json.loads((resolve(path) / "config.json").read_text())


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
  try:
    return _family(hf).config(hf)
  except KeyError as error:
    raise ValueError(f"config.json lacks {error}") from error


def _flat_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
  leaves, _ = jax.tree.flatten_with_path(
    parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  return {"/".join(p.key for p in path): shape for path, shape in leaves}


def _nest(flat: dict[str, Any]) -> Params:
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split("/")
    node = tree
    for name in parents:
      node = node.setdefault(name, {})
    node[last] = leaf
  return tree


def _expected(hf, config) -> dict[str, tuple[list[str], bool]]:
  """Our path -> (Hugging Face's names, one a layer; stored transposed)."""
  keys = _family(hf).KEYS
  names = {}
  for path in _flat_shapes(config):
    template, transposed = keys[path]
    count = config.layers if path.startswith("layers/") else 1
    names[path] = ([template.format(i) for i in range(count)], transposed)
  return names


def _tensor_files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
  """Which safetensors file holds each tensor."""
  files = sorted(directory.glob("*.safetensors"))
  if not files:
    raise ValueError(
      f"{directory} holds no *.safetensors (pickled weights are not read)"
    )
  where = {}
  for file in files:
    try:
      with safe_open(file, framework="numpy") as tensors:
        where |= {name: file for name in tensors.keys()}
    except SafetensorError as error:
      raise ValueError(
        f"{file} is not a whole safetensors file ({error}): download it again"
      ) from error
  return where


def load_params(path: str | pathlib.Path, dtype=jnp.float32) -> Params:
  """Reads a directory's weights into our layout.

  Args:
    path: directory or embedded name, see `resolve`.
    dtype: of the returned arrays.

  Raises:
    ValueError: missing or surplus tensors (all listed), or a wrong shape.
  """
  directory = resolve(path)
  hf = read_config(directory)
  config = to_transformer_config(hf)
  expected, where = _expected(hf, config), _tensor_files(directory)
  wanted = {name for names, _ in expected.values() for name in names}
  # Old exporters also stored what follows from config.json.
  derived = "rotary_emb.inv_freq"
  surplus = {n for n in where if not n.endswith(derived)} - wanted
  if config.tied:  # some exporters write the tied head out a second time
    surplus.discard("lm_head.weight")
  if wanted - set(where) or surplus:
    raise ValueError(
      f"the weights in {directory} do not fit its config.json; missing: "
      f"{sorted(wanted - set(where))}, surplus: {sorted(surplus)}"
    )
  shapes, flat = _flat_shapes(config), {}
  for path_, (names, transposed) in expected.items():
    rows = []
    for name in names:
      with safe_open(where[name], framework="numpy") as tensors:
        row = tensors.get_tensor(name)
      rows.append(row.T if transposed else row)
    array = np.stack(rows) if path_.startswith("layers/") else rows[0]
    if array.shape != shapes[path_]:
      raise ValueError(
        f"{names[0]} gives {path_} the shape {array.shape}, but config.json "
        f"says {shapes[path_]}"
      )
    flat[path_] = jnp.asarray(array, dtype)
  return _nest(flat)


def load(
  path: str | pathlib.Path, *, dtype=jnp.float32, remat: bool = False
) -> tuple[LM, Params]:
  """Reads a model directory: the model's functions and its parameters.

  Args:
    path: directory or embedded name, see `resolve`.
    dtype: of computation, see `transformer`; the parameters are float32.
    remat: see `transformer`.

  Raises:
    ValueError: an unsupported architecture, or weights that do not fit.
  """
  config = to_transformer_config(read_config(path))
  return transformer(config, dtype=dtype, remat=remat), load_params(path)


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies what a model directory holds besides its weights."""
  for name in COMPANIONS:
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)


def save(
  path: str | pathlib.Path, params: Params, source: str | pathlib.Path
) -> None:
  """Writes a model directory that `load` and transformers read.

  Args:
    path: the directory to make; nothing stands at `path` until all is written.
    params: parameters in our layout, in the dtype to store.
    source: the directory that the model came from; its configuration,
      generation configuration and tokenizer files are copied.

  Raises:
    ValueError: `path` exists already.
  """
  path, source = pathlib.Path(path), resolve(source)
  if path.exists():
    raise ValueError(f"{path} exists already; remove it or choose another path")
  hf = read_config(source)
  tensors = {}
  for name, (names, transposed) in _expected(
    hf, to_transformer_config(hf)
  ).items():
    array = params
    for part in name.split("/"):
      array = array[part]
    array = np.asarray(array)
    rows = array if name.startswith("layers/") else [array]
    for key, row in zip(names, rows, strict=True):
      tensors[key] = np.ascontiguousarray(row.T if transposed else row)
  hf["dtype"] = str(next(iter(tensors.values())).dtype)
  partial = path.with_name(path.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  copy_files(source, partial)
  (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
  weights = partial / "model.safetensors"
  save_file(tensors, weights, metadata={"format": "pt"})
  weights.chmod(0o644)  # safetensors makes it readable by its owner only
  partial.rename(path)
