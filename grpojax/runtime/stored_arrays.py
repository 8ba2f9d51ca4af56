"""Trees of arrays as Orbax stores them, with checksums that are verified.

With the arrays of a checkpoint, in the same file as Orbax's own account of it,
stand the shape, dtype and checksum of each (see `array_checksums`): what comes
back is bit by bit what was saved, or refused.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from grpojax.runtime import array_checksums

# In Orbax's custom metadata:
_ARRAYS = "arrays"  # path -> [kind, checksum]
_NOTES = "notes"  # [JSON, its checksum]


def _is_key(leaf) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(key) -> str:
  """Name of a typed key's generator; `key` may be abstract."""
  names = []
  jax.eval_shape(lambda k: names.append(jax.random.key_impl(k)), key)
  return names[0]


def plain(tree: PyTree) -> PyTree:
  """A tree as it is stored: typed random keys as their data."""
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if _is_key(x) else x, tree
  )


def with_keys(stored: PyTree, like: PyTree) -> PyTree:
  """What `plain` made of a tree like `like`, with its typed random keys."""

  def one(old, new):
    if not _is_key(old):
      return new
    return jax.random.wrap_key_data(new, impl=_key_impl(old))

  return jax.tree.map(one, like, stored)


def abstract(tree: PyTree) -> PyTree:
  """What to load for a tree: shapes, dtypes and shardings of what is stored.

  Args:
    tree: arrays, or `jax.ShapeDtypeStruct`s; without a sharding, they go to the
      first device.
  """
  return jax.tree.map(_abstract, tree)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  """Shape, dtype and sharding of a leaf; keys as their data."""
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  sharding = getattr(leaf, "sharding", None)
  if sharding is None or _is_key(leaf):
    # Orbax would otherwise repeat the sharding of the machine that saved.
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
      sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
      spec = jax.sharding.PartitionSpec()
      sharding = jax.sharding.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _kinds(tree: PyTree) -> dict[str, str]:
  """Shape and dtype of each leaf by path, in words that compare."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      f"{leaf.dtype}{list(leaf.shape)}"
    )
    for path, leaf in leaves
  }


def describe(tree: PyTree) -> dict[str, dict[str, list[str]]]:
  """What `load` will want to know: Orbax's `custom_metadata` for a tree."""
  kinds, sums = _kinds(tree), array_checksums.by_path(tree)
  return {_ARRAYS: {name: [kinds[name], sums[name]] for name in sums}}


def sealed(notes: Mapping[str, Any]) -> dict[str, list[str]]:
  """JSON values to keep with a tree, in its `custom_metadata`."""
  text = json.dumps(notes, sort_keys=True)
  return {_NOTES: [text, _crc(text)]}


def _crc(text: str) -> str:
  return f"{zlib.crc32(text.encode()):08x}"


def read_notes(path: epath.Path, advice: str) -> dict[str, Any]:
  """What `sealed` put there.

  Args:
    path: of one checkpoint.
    advice: what to do where it is damaged.

  Raises:
    ValueError: it is damaged.
  """
  try:
    text, crc = ocp.metadata(path).custom_metadata[_NOTES]
    if _crc(text) != crc:
      raise ValueError("its notes are not those that were saved")
    return json.loads(text)
  except Exception as error:
    raise ValueError(
      f"{path} is damaged ({innermost(error)}): {advice}"
    ) from error


def innermost(error: BaseException) -> str:
  """The error that began it all, in a few words."""
  while error.__cause__ or error.__context__:
    error = error.__cause__ or error.__context__
  text = str(error).split(" [")[0]  # TensorStore ends with all its settings
  return f"{type(error).__name__}: {text[:400]}"


def _check_fits(
  a: Mapping[str, str], b: Mapping[str, str], path: epath.Path
) -> None:
  # Before loading: a load that fails half-way leaves Orbax's threads behind.
  different = [
    f"{name}: {a.get(name, '(none)')} -> {b.get(name, '(none)')}"
    for name in sorted(a.keys() | b.keys())
    if a.get(name) != b.get(name)
  ]
  if different:
    more = f"\n  and {len(different) - 8} more" if len(different) > 8 else ""
    raise ValueError(
      f"{path} is of another model or optimizer (its array -> yours):\n  "
      + "\n  ".join(different[:8])
      + more
    )


def load(
  path: epath.Path, like: PyTree, advice: str, part: str | None = None
) -> PyTree:
  """Loads what is stored, and checks that it is what was saved.

  Args:
    path: of one checkpoint, saved with what `describe` says of it.
    like: abstract arrays with shardings.
    advice: what to do where it is damaged.
    part: where not None, `like` is of this entry of what is stored, and nothing
      else is read.

  Returns:
    Arrays as `like`.

  Raises:
    ValueError: it is damaged, or `like` is of another model or optimizer.
  """

  def damaged(what):
    return ValueError(f"{path} is damaged ({what}): {advice}")

  try:
    metadata = ocp.metadata(path)
    stored, arrays = metadata.metadata, metadata.custom_metadata[_ARRAYS]
    saved = {name: kind for name, (kind, _) in arrays.items()}
  except Exception as error:
    raise damaged(innermost(error)) from error
  if stored is None:  # Orbax has logged why
    raise damaged("its metadata cannot be read")
  if _kinds(stored) != saved:
    raise damaged("its metadata are not those of its arrays")
  wanted = like
  if part is not None:
    like = {part: like}
    wanted = jax.tree.map(lambda _: ocp.PLACEHOLDER, stored) | like
    saved = {n: kind for n, kind in saved.items() if n.startswith(f"{part}/")}
  _check_fits(saved, _kinds(like), path)
  state = dataclasses.is_dataclass(like)
  if state:  # fields that hold nothing may be younger than what is stored
    wanted = {name: getattr(like, name) for name in stored}
  try:
    loaded = ocp.load(path, wanted)
  except Exception as error:
    raise damaged(innermost(error)) from error
  if state:
    loaded = dataclasses.replace(like, **loaded)
  if part is not None:
    loaded = {part: loaded[part]}
  sums = array_checksums.by_path(loaded)
  wrong = [name for name, value in sums.items() if arrays[name][1] != value]
  if wrong:
    raise damaged(f"{', '.join(wrong[:3])}: not the values that were saved")
  return loaded if part is None else loaded[part]
