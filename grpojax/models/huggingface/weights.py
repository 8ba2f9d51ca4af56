"""Reads safetensors files into sharded arrays, leaf by leaf.

A leaf of our parameter tree is a stored tensor or a stack of them, possibly
transposed. It is read straight into the shards of a `jax.Array`, so the host
needs memory for a single leaf. Pickled weights are never read.
"""

import itertools
import json
import math
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = {  # dtypes by safetensors' names
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}
_LISTED = 20  # maximum number of names in a message
_BLOCK = 2**20  # bytes to map at a time, because mapped bytes count as memory


class Leaf(NamedTuple):
  """Stored tensors that make up an array, as in this example.

  "layers/q" [2, D, H E]: model.layers.0.self_attn.q_proj.weight [H E, D]
  (stacked = 1,           model.layers.1.self_attn.q_proj.weight [H E, D]
  transposed)
  """

  names: tuple[str, ...]  # in row-major order of the stacked axes
  shape: tuple[int, ...]  # of the array
  stacked: int = 0  # number of leading axes that are not stored
  transposed: bool = False  # stored as [out, in] instead of [in, out]
  # The first row of this part in a stored matrix [rows, in], and all its rows.
  part: tuple[int, int] | None = None

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """Shape of each tensor in the file."""
    shape = self.shape[self.stacked :]
    shape = shape[::-1] if self.transposed else shape
    return (self.part[1], *shape[1:]) if self.part else shape


class Stored(NamedTuple):
  """Location of a tensor; `dtype` is safetensors' name, `offset` in bytes."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Maps rows start .. stop - 1 of the tensor into memory."""
    dtype = STORED_DTYPES[self.dtype]
    row = math.prod(self.shape[1:])
    place = self.offset + start * row * dtype.itemsize
    shape = (stop - start, *self.shape[1:])
    return np.memmap(self.file, dtype, "r", place, shape)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object; ValueError for other files."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ValueError(f"{path} does not exist") from None
  except (RecursionError, ValueError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} is not a JSON object")
  return value


def header(file: pathlib.Path) -> dict[str, Stored]:
  """Returns a file's tensors, after safetensors has checked its header.

  The library would map the whole file to read tensors, and keep its pages.
  """
  try:
    with safe_open(file, framework="numpy"):
      pass
  except FileNotFoundError:
    raise ValueError(f"{file} does not exist") from None
  except SafetensorError as error:
    text = f"{file} is cut off or damaged ({error}): download it again"
    raise ValueError(text) from error
  with open(file, "rb") as stream:
    (size,) = struct.unpack("<Q", stream.read(8))
    header = json.loads(stream.read(size))
  header.pop("__metadata__", None)
  offset = lambda x: 8 + size + x["data_offsets"][0]
  return {
    name: Stored(file, x["dtype"], tuple(x["shape"]), offset(x))
    for name, x in header.items()
  }


def _indexed_files(directory: pathlib.Path) -> dict[str, str]:
  index = directory / INDEX
  file_of = read_json(index).get("weight_map")
  if not isinstance(file_of, dict) or not file_of:
    raise ValueError(f"{index} has no weight_map: download it again")
  names = sorted({str(name) for name in file_of.values()})
  for name in names:
    # Accept names only: an index must not reach outside its directory.
    if not name.endswith(".safetensors") or {"/", "\\"} & set(name):
      raise ValueError(
        f"{index} names {name!r}; only *.safetensors beside it are read"
      )
  return file_of


def find(directory: pathlib.Path) -> dict[str, Stored]:
  """Returns a directory's tensors by name; ValueError for damaged files."""
  if (directory / SINGLE).is_file():
    return header(directory / SINGLE)
  if not (directory / INDEX).is_file():
    formats = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
    others = [p.name for glob in formats for p in sorted(directory.glob(glob))]
    unread = f"; cannot read {', '.join(others)}" if others else ""
    for file in directory.glob("*.gguf"):
      unread += f"; to read {file.name}, use model.path={file}"
    raise ValueError(
      f"{directory} holds neither {SINGLE} nor {INDEX}{unread}. Pickled "
      "weights are never read: get the model as safetensors"
    )
  file_of = _indexed_files(directory)
  tensors = {}
  for file in sorted(set(file_of.values())):
    # A tensor that is not in the file named in the index counts as missing.
    stored = header(directory / file).items()
    tensors |= {
      name: x for name, x in stored if file_of.get(name, file) == file
    }
  return tensors


_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "visual.", "mtp.")


def text_part(tensors: dict[str, Stored]) -> dict[str, Stored]:
  """Returns a multimodal model's text tensors, by the text model's names.

  transformers 4 stores language_model.model.X, transformers 5 may store
  model.language_model.X; both are model.X in the text model.
  """
  text = {}
  for name, x in tensors.items():
    name = name.removeprefix("model.")
    if name.startswith(_NOT_TEXT):
      continue
    name = name.removeprefix("language_model.").removeprefix("model.")
    name = name if name.startswith("lm_head.") else f"model.{name}"
    if name in text:
      raise ValueError(f"{x.file} and {text[name].file} both have {name}")
    text[name] = x
  return text


def split_experts(tensors: dict[str, Stored]) -> dict[str, Stored]:
  """Returns the tensors with each expert's matrices in place of joined ones.

  Qwen3.5 stores the matrices [2 F, D] (gate, up) and [D, F] of a layer's X
  experts as mlp.experts.gate_up_proj [X, 2 F, D] and mlp.experts.down_proj.
  ValueError for experts that are stored twice.
  """
  split = {}
  for joined_name, x in tensors.items():
    prefix, _, joined = joined_name.rpartition("mlp.experts.")
    kinds = joined.removesuffix("_proj").split("_")
    is_joined = joined in ("gate_up_proj", "down_proj") and len(x.shape) == 3
    if not is_joined or x.shape[1] % len(kinds):
      split[joined_name] = x
      continue
    shape = x.shape[1] // len(kinds), x.shape[2]
    # `check` refuses other dtypes, so their size does not matter.
    size = (
      math.prod(shape) * STORED_DTYPES.get(x.dtype, np.dtype("u1")).itemsize
    )
    matrices = itertools.product(range(x.shape[0]), kinds)
    for i, (expert, kind) in enumerate(matrices):
      name = f"{prefix}mlp.experts.{expert}.{kind}_proj.weight"
      if name in tensors:
        text = f"{x.file.parent} holds both {joined_name} and {name}"
        raise ValueError(f"{text}: remove one of them")
      split[name] = x._replace(shape=shape, offset=x.offset + i * size)
  return split


def _listed(names: list[str]) -> str:
  more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
  return ", ".join(names[:_LISTED] + more)


def check(
  directory: pathlib.Path, layout: Mapping[str, Leaf], tensors: dict[str, Any]
) -> None:
  """Raises ValueError, with a list, for missing, surplus and wrong tensors."""
  shapes = {n: x.stored_shape for x in layout.values() for n in x.names}
  both = [(n, tensors[n]) for n in sorted(shapes.keys() & tensors.keys())]
  problems = {
    "missing": sorted(shapes.keys() - tensors.keys()),
    "surplus": sorted(tensors.keys() - shapes.keys()),
    "of another shape": [
      f"{name} {list(x.shape)} instead of {list(shapes[name])}"
      for name, x in both
      if x.shape != shapes[name]
    ],
    "of an unsupported type": [
      f"{name} {x.dtype}" for name, x in both if x.dtype not in STORED_DTYPES
    ],
  }
  lines = [f"the weights in {directory} do not fit config.json"]
  lines += [f"{kind}: {_listed(x)}" for kind, x in problems.items() if x]
  if len(lines) > 1:
    raise ValueError("\n  ".join(lines))


def _blocks(stored: Any, rows: slice) -> Iterator[tuple[int, int]]:
  """Yields start and stop of each block of rows."""
  size = math.prod(stored.shape[1:]) * STORED_DTYPES[stored.dtype].itemsize
  step = max(1, _BLOCK // size)
  for start in range(rows.start, rows.stop, step):
    yield start, min(start + step, rows.stop)


def equal(a: Any, b: Any) -> bool:
  """Returns True if two stored tensors are equal in float32."""
  if a.shape != b.shape or not {a.dtype, b.dtype} <= STORED_DTYPES.keys():
    return False
  in_float32 = lambda x, block: x.rows(*block).astype(np.float32)
  return all(
    np.array_equal(in_float32(a, x), in_float32(b, x), equal_nan=True)
    for x in _blocks(a, slice(0, a.shape[0]))
  )


def is_finite(block: np.ndarray) -> bool:
  """Returns `np.isfinite(block).all()`, fast in bfloat16 too."""
  # Infinities and NaN are the values with all bits of the exponent set.
  info = jnp.finfo(block.dtype)
  exponent = (2**info.nexp - 1) << info.nmant
  bits = block.view(f"u{block.dtype.itemsize}") & exponent
  return not bits.size or bool(bits.max() != exponent)


def _copy(stored: Any, index: tuple[slice, ...], target: np.ndarray) -> bool:
  """Copies a part of a tensor to `target`; returns True if it is finite."""
  rows, *others = index
  finite = True
  for start, stop in _blocks(stored, rows):
    # NumPy is slow if it casts and transposes in one step.
    block = stored.rows(start, stop)[:, *others]
    block = block.astype(target.dtype, copy=False)
    target[start - rows.start : stop - rows.start] = block
    finite = finite and is_finite(block)
  return finite


def _read_part(leaf: Leaf, tensors, index, dtype) -> np.ndarray:
  """Reads the part of a leaf at `index`, a slice for each axis."""
  index = tuple(
    slice(*s.indices(size)) for s, size in zip(index, leaf.shape, strict=True)
  )
  out = np.empty([s.stop - s.start for s in index], dtype)
  lead = index[: leaf.stacked]
  inner = index[leaf.stacked :]
  for place in np.ndindex(out.shape[: leaf.stacked]):
    position = [s.start + i for s, i in zip(lead, place, strict=True)]
    number = np.ravel_multi_index(position, leaf.shape[: leaf.stacked])
    stored = tensors[leaf.names[number]]
    target = out[place]
    rows, *others = inner[::-1] if leaf.transposed else inner
    first = leaf.part[0] if leaf.part else 0
    rows = slice(rows.start + first, rows.stop + first)
    target = target.T if leaf.transposed else target
    if not _copy(stored, (rows, *others), target):
      raise ValueError(
        f"{stored.file}: {leaf.names[number]} has NaN or infinite values (as "
        f"{np.dtype(dtype)}): download the model again"
      )
  return out


def read(
  leaf: Leaf,
  tensors: Mapping[str, Any],
  dtype: Any,
  sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """Reads the parts of a leaf that this process's devices hold.

  ValueError for NaN and infinite values.
  """
  if sharding is None:
    whole = (slice(None),) * len(leaf.shape)
    array = jax.device_put(_read_part(leaf, tensors, whole, dtype))
  else:
    parts = {}  # devices share a copy of the same part

    def part(index):
      key = tuple((s.start, s.stop) for s in index)
      if key not in parts:
        parts[key] = _read_part(leaf, tensors, index, dtype)
      return parts[key]

    array = jax.make_array_from_callback(leaf.shape, sharding, part)
  return jax.block_until_ready(array)  # then the host's copy can be freed
