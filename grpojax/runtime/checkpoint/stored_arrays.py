"""Trees of arrays as Orbax stores them, with checksums that are verified.

Orbax writes an array's chunks without a checksum: a bit that flips on the disk
comes back as another weight. So its custom metadata hold the shape, dtype and
checksum of each array.

An array is read as 32-bit words w_i (smaller elements make a word each). Its
checksum is the sum of mix(w_i) c_i mod 2^32 over odd numbers c_i, where mix is
one-to-one. A sum does not depend on how it is split over devices. Any change of
one word is noticed (c_i has an inverse mod 2^32); other damage goes unnoticed
with a probability of about 2^-32.
"""

import contextlib
import dataclasses
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint import v1 as ocp

# Entries of Orbax's custom metadata:
_ARRAYS = "arrays"  # {path: ["float32[2, 3]", checksum]}
_NOTES = "notes"  # [JSON, its checksum]


class _Damaged(Exception):
  """Stored arrays or notes are not those that were saved; says which."""


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
  """Spreads every bit over a word, one-to-one (MurmurHash3's finalizer)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  return x ^ (x >> 13)


@jax.jit
def checksum(x: Array) -> UInt32[Array, ""]:
  """Returns the checksum of one array of numbers, of any shape and dtype."""
  if x.dtype != jnp.bool_:
    bits = 8 * min(x.dtype.itemsize, 4)
    x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
  words = x.astype(jnp.uint32)
  position = jnp.uint32(0)  # i of w_i, made of iotas that shard as `words` do
  for axis in range(words.ndim):
    stride = math.prod(words.shape[axis + 1 :]) % 2**32
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position += index * jnp.uint32(stride)
  return jnp.sum(_mix(words) * (_mix(position) | 1), dtype=jnp.uint32)


@jax.jit
def _checksums(arrays: list[Array]) -> list[UInt32[Array, ""]]:
  # One program: dozens at once, each waiting for other devices, are more than
  # the threads of XLA's CPU backend, which then all wait for each other.
  return [checksum(x) for x in arrays]


def _leaves(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by path, such as "layers/q"."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def checksums(tree: PyTree) -> dict[str, str]:
  """Returns each array's checksum by its path in a tree, in hexadecimal."""
  arrays = _leaves(tree)
  sums = jax.device_get(_checksums([*arrays.values()]))
  return {
    path: f"{int(value):08x}" for path, value in zip(arrays, sums, strict=True)
  }


def reason(error: BaseException) -> str:
  """Returns the first error of a chain, in a few words."""
  while error.__cause__ or error.__context__:
    error = error.__cause__ or error.__context__
  text = str(error).split(" [")[0]  # TensorStore ends with all its settings
  if isinstance(error, _Damaged):
    return text
  return f"{type(error).__name__}: {text[:400]}"


@contextlib.contextmanager
def _damage(path: epath.Path, advice: str) -> Iterator[None]:
  """Turns all errors in reading into one sentence with advice."""
  try:
    yield
  except Exception as error:
    raise ValueError(
      f"{path} is damaged ({reason(error)}): {advice}"
    ) from error


def _is_key(leaf) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_keys(tree: PyTree) -> PyTree:
  """Returns a tree as it is stored: typed random keys as their data."""
  data = lambda x: jax.random.key_data(x) if _is_key(x) else x
  return jax.tree.map(data, tree)


def _with_keys(stored: PyTree, like: PyTree) -> PyTree:
  """Inverts `without_keys`; `like` has the key types, and may be abstract."""

  def with_key(old, new):
    if not _is_key(old):
      return new
    names = []  # asked while tracing: `old` may be a shape
    jax.eval_shape(lambda k: names.append(jax.random.key_impl(k)), old)
    return jax.random.wrap_key_data(new, impl=names[0])

  return jax.tree.map(with_key, like, stored)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding to load for a leaf."""
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  sharding = getattr(leaf, "sharding", None)
  mesh = getattr(sharding, "mesh", None)
  if _is_key(leaf) and mesh is not None:
    spec = jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(mesh, spec)
  elif _is_key(leaf) or sharding is None:
    # Orbax would otherwise repeat the sharding of the machine that saved.
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _kinds(tree: PyTree) -> dict[str, str]:
  """Returns the dtype and shape of each leaf by path, such as "int32[2]"."""
  return {
    path: f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in _leaves(tree).items()
  }


def _crc(text: str) -> str:
  return f"{zlib.crc32(text.encode()):08x}"


def describe(
  tree: PyTree, notes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the custom metadata: checksums by which to verify, and notes."""
  kinds, sums = _kinds(tree), checksums(tree)
  about = {_ARRAYS: {name: [kinds[name], sums[name]] for name in sums}}
  if notes is not None:
    text = json.dumps(notes, sort_keys=True)
    about[_NOTES] = [text, _crc(text)]
  return about


def read_notes(path: epath.Path, advice: str) -> dict[str, Any]:
  """Returns the notes of `describe`; ValueError if damaged."""
  with _damage(path, advice):
    text, crc = ocp.metadata(path).custom_metadata[_NOTES]
    if _crc(text) != crc:
      raise _Damaged("its notes are not those that were saved")
    return json.loads(text)


def _check_fits(
  saved: Mapping[str, str], wished: Mapping[str, str], path: epath.Path
) -> None:
  # Before loading: a load that fails half-way leaves Orbax's threads behind.
  pairs = {
    name: f"{saved.get(name, '(none)')} -> {wished.get(name, '(none)')}"
    for name in sorted(saved.keys() | wished.keys())
    if saved.get(name) != wished.get(name)
  }
  if "key" in pairs:
    raise ValueError(
      f"{path} was saved under another random number generator "
      f"({pairs['key']}): set JAX_DEFAULT_PRNG_IMPL to its value when the run "
      "started"
    )
  if pairs:
    lines = [f"{name}: {pair}" for name, pair in pairs.items()]
    if len(lines) > 8:
      lines[8:] = [f"and {len(lines) - 8} more"]
    raise ValueError(
      f"{path} is of another model or optimizer (its array -> yours):\n  "
      + "\n  ".join(lines)
    )


def load(
  path: epath.Path, like: PyTree, advice: str, partial: bool = False
) -> PyTree:
  """Loads a tree that was saved with the metadata of `describe`; verifies it.

  Args:
    path: path of one checkpoint.
    like: arrays, or `jax.ShapeDtypeStruct`s. The pending rollout of a
      `TrainState` has the size that was saved, and the layout of the step.
    advice: what to do if it is damaged, for the ValueError.
    partial: True if `like` is a dict of some entries of the tree; the others
      are not read.
  """
  is_state = dataclasses.is_dataclass(like)
  with _damage(path, advice):
    metadata = ocp.metadata(path)
    stored, arrays = metadata.metadata, metadata.custom_metadata[_ARRAYS]
    saved = {name: kind for name, (kind, _) in arrays.items()}
    if stored is None:  # Orbax has logged why
      raise _Damaged("its metadata cannot be read")
    if _kinds(stored) != saved:
      raise _Damaged("its metadata are not those of its arrays")
    if is_state:
      pending = stored.get("pending")
      sharding = getattr(like.step, "sharding", None)
      pending = pending and jax.ShapeDtypeStruct(
        pending.shape, pending.dtype, sharding=sharding
      )
      like = dataclasses.replace(like, pending=pending)
  request = abstract = jax.tree.map(_abstract, like)
  if partial:
    request = jax.tree.map(lambda _: ocp.PLACEHOLDER, stored) | abstract
    saved = {n: kind for n, kind in saved.items() if n.split("/")[0] in like}
  elif is_state:  # fields that hold nothing may be younger than the checkpoint
    request = {name: getattr(abstract, name) for name in stored}
  _check_fits(saved, _kinds(abstract), path)
  with _damage(path, advice):
    loaded = ocp.load(path, request)
    if partial:
      loaded = {name: loaded[name] for name in like}
    elif is_state:
      loaded = dataclasses.replace(abstract, **loaded)
    sums = checksums(loaded)
    wrong = [name for name, value in sums.items() if arrays[name][1] != value]
    if wrong:
      raise _Damaged(f"{', '.join(wrong[:3])}: not the values that were saved")
  return _with_keys(loaded, like)
