"""Checksums of the arrays in a checkpoint, which loading verifies.

Orbax stores arrays without a checksum, so a flipped bit on the disk would
silently change a weight. Therefore the shape, dtype and checksum of each array
are added to the checkpoint's custom metadata.

An array is read as 32-bit words w_i (a smaller element becomes one word). Its
checksum is the sum of mix(w_i) c_i mod 2^32, with odd numbers c_i and a
bijective mix. It does not depend on the sharding. It detects any
change of a single word (c_i has an inverse mod 2^32), and misses other damage
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
  """Raised for damaged arrays, notes or metadata, which the message names."""


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
  """Mixes a word's bits bijectively (the start of MurmurHash3's finalizer)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  return x ^ (x >> 13)


@jax.jit
def checksum(x: Array) -> UInt32[Array, ""]:
  """Returns the checksum of an array of numbers, of any shape and dtype."""
  if x.dtype != jnp.bool_:
    bits = 8 * min(x.dtype.itemsize, 4)
    x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
  words = x.astype(jnp.uint32)
  position = jnp.uint32(0)  # i of w_i: a sum of iotas, sharded like `words`
  for axis in range(words.ndim):
    # uint32 arithmetic is modulo 2^32, and so is the position.
    stride = math.prod(words.shape[axis + 1 :]) % 2**32
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position += index * jnp.uint32(stride)
  return jnp.sum(_mix(words) * (_mix(position) | 1), dtype=jnp.uint32)


@jax.jit
def _checksums(arrays: list[Array]) -> list[UInt32[Array, ""]]:
  # One program for all arrays: dozens of programs that wait for other devices
  # would exhaust the threads of XLA's CPU backend and deadlock.
  return [checksum(x) for x in arrays]


def _leaves(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by path, such as "layers/q"."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def checksums(tree: PyTree) -> dict[str, str]:
  """Returns the arrays' checksums by path, in hexadecimal."""
  arrays = _leaves(tree)
  sums = jax.device_get(_checksums([*arrays.values()]))
  return {k: f"{int(x):08x}" for k, x in zip(arrays, sums, strict=True)}


def reason(error: BaseException) -> str:
  """Describes the exception that started a chain of causes."""
  while error.__cause__ or error.__context__:
    error = error.__cause__ or error.__context__
  text = str(error).split(" [")[0]  # TensorStore appends all its settings
  if isinstance(error, _Damaged):
    return text
  return f"{type(error).__name__}: {text[:400]}"


@contextlib.contextmanager
def _damage(path: epath.Path, advice: str) -> Iterator[None]:
  """Converts every error of a read to a ValueError with advice."""
  try:
    yield
  except Exception as error:
    text = f"{path} is damaged ({reason(error)}): {advice}"
    raise ValueError(text) from error


def _is_key(leaf) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_keys(tree: PyTree) -> PyTree:
  """Replaces typed random keys by their data, which Orbax can store."""
  data = lambda x: jax.random.key_data(x) if _is_key(x) else x
  return jax.tree.map(data, tree)


def _with_keys(stored: PyTree, like: PyTree) -> PyTree:
  """Restores the random keys in a stored tree, with the types in `like`."""

  def with_key(old, new):
    if not _is_key(old):
      return new
    names = []  # filled during tracing, because `old` may be abstract
    jax.eval_shape(lambda k: names.append(jax.random.key_impl(k)), old)
    return jax.random.wrap_key_data(new, impl=names[0])

  return jax.tree.map(with_key, like, stored)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding with which to load a leaf."""
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  sharding = getattr(leaf, "sharding", None)
  mesh = getattr(sharding, "mesh", None)
  if _is_key(leaf) and mesh is not None:
    # Replicated, because a key's data has another rank than the key.
    spec = jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(mesh, spec)
  elif _is_key(leaf) or sharding is None:
    # Orbax would otherwise use the saved sharding.
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _kinds(tree: PyTree) -> dict[str, str]:
  """Returns the leaves' dtypes and shapes by path, such as "int32[2]"."""
  leaves = _leaves(tree)
  return {k: f"{leaf.dtype}{list(leaf.shape)}" for k, leaf in leaves.items()}


def _crc(text: str) -> str:
  return f"{zlib.crc32(text.encode()):08x}"


def describe(tree: PyTree, notes: Mapping | None = None) -> dict[str, Any]:
  """Returns the custom metadata of a tree: checksums and notes."""
  sums = checksums(tree)
  arrays = {path: [kind, sums[path]] for path, kind in _kinds(tree).items()}
  about: dict[str, Any] = {_ARRAYS: arrays}
  if notes is not None:
    text = json.dumps(notes, sort_keys=True)
    about[_NOTES] = [text, _crc(text)]
  return about


def read_notes(path: epath.Path, advice: str) -> dict[str, Any]:
  """Returns the notes stored by `describe`; ValueError if damaged."""
  with _damage(path, advice):
    text, crc = ocp.metadata(path).custom_metadata[_NOTES]
    if _crc(text) != crc:
      raise _Damaged("its notes have changed since they were saved")
    return json.loads(text)


def _check_fits(saved, requested, path) -> None:
  """Raises ValueError if saved and requested shapes or dtypes differ."""
  pairs = {
    name: f"{saved.get(name, '(none)')} -> {requested.get(name, '(none)')}"
    for name in sorted(saved.keys() | requested.keys())
    if saved.get(name) != requested.get(name)
  }
  if "key" in pairs:
    raise ValueError(
      f"{path} was saved under another random number generator "
      f"({pairs['key']}): set JAX_DEFAULT_PRNG_IMPL to its value at the start "
      "of the run"
    )
  if pairs:
    lines = [f"{name}: {pair}" for name, pair in pairs.items()]
    if len(lines) > 8:
      lines[8:] = [f"and {len(lines) - 8} more"]
    raise ValueError(
      f"{path} is of another model or optimizer (saved -> requested):\n  "
      + "\n  ".join(lines)
    )


def load(
  path: epath.Path, like: PyTree, advice: str, partial: bool = False
) -> PyTree:
  """Loads a tree and verifies the checksums that `describe` stored.

  Leaves of `like` are arrays or `jax.ShapeDtypeStruct`s. `pending` of a
  `TrainState` is loaded with its saved shape, sharded as its `step`. Errors
  about damage end with `advice`. `partial`: load only keys of the dict `like`.
  """
  is_state = dataclasses.is_dataclass(like)
  with _damage(path, advice):
    metadata = ocp.metadata(path)
    stored = metadata.metadata
    arrays = metadata.custom_metadata[_ARRAYS]
    saved = {name: kind for name, (kind, _) in arrays.items()}
    if stored is None:  # Orbax has logged the error
      raise _Damaged("its metadata cannot be read")
    if _kinds(stored) != saved:
      raise _Damaged("its metadata does not fit its arrays")
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
  elif is_state:  # the checkpoint may lack newer fields without arrays
    request = {name: getattr(abstract, name) for name in stored}
  _check_fits(saved, _kinds(abstract), path)  # a failed load leaves threads
  with _damage(path, advice):
    loaded = ocp.load(path, request)
    if partial:
      loaded = {name: loaded[name] for name in like}
    elif is_state:
      loaded = dataclasses.replace(abstract, **loaded)
    sums = checksums(loaded)
    changed = [name for name, value in sums.items() if arrays[name][1] != value]
    if changed:
      names = ", ".join(changed[:3])
      raise _Damaged(f"{names}: changed since they were saved")
  return _with_keys(loaded, like)
