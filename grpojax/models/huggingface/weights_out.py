"""Writes safetensors files tensor by tensor.

The safetensors library needs all tensors of a file at once, which would be a
second copy of the model in the host's memory.
"""

import collections
import contextlib
import fcntl
import json
import math
import os
import pathlib
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import jax
import numpy as np

from grpojax.core.meshes import fetch
from grpojax.models.huggingface.weights import (
  INDEX,
  SINGLE,
  STORED_DTYPES,
  Leaf,
)

_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def _shards(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
  """Splits names, in order, into files of at most `largest` bytes."""
  shards = [[]]
  used = 0
  for name, size in sizes.items():
    if shards[-1] and largest and used + size > largest:
      shards.append([])
      used = 0
    shards[-1].append(name)
    used += size
  return shards


def _write_header(
  stream: BinaryIO, entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
) -> None:
  # transformers requires "pt", the layout of PyTorch.
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for name, (dtype, shape) in entries.items():
    place = [offset, offset + math.prod(shape) * dtype.itemsize]
    header[name] = {"dtype": _NAMES[dtype], "shape": list(shape)}
    header[name]["data_offsets"] = place
    offset = place[1]
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # aligns the data
  stream.write(struct.pack("<Q", len(text)) + text)


def _tensors(leaf: Leaf, array: Any, dtype: np.dtype) -> Iterator[np.ndarray]:
  """Yields the tensors of a leaf in stored layout."""
  if isinstance(array, jax.Array) and not leaf.stacked:
    array = array.copy()  # the original would cache fetched values
  for place in np.ndindex(leaf.shape[: leaf.stacked]):
    tensor = fetch(array[place] if place else array)
    yield np.ascontiguousarray(tensor.T if leaf.transposed else tensor, dtype)


def _all_tensors(
  layout: Mapping[str, Leaf], arrays: Mapping[str, Any], dtype: Any
) -> Iterator[np.ndarray]:
  """Yields all stored tensors, with their parts joined, in a fixed order."""
  for paths in _groups(layout):
    parts = [
      _tensors(
        layout[path], arrays[path], np.dtype(dtype or arrays[path].dtype)
      )
      for path in paths
    ]
    for tensors in zip(*parts, strict=True):
      yield np.concatenate(tensors) if len(tensors) > 1 else tensors[0]


def _groups(layout: Mapping[str, Leaf]) -> list[list[str]]:
  """Returns the paths that are parts of the same tensors, in their order."""
  groups = collections.defaultdict(list)
  for path, leaf in layout.items():
    groups[leaf.names].append(path)
  first = lambda path: (layout[path].part or (0,))[0]
  return [sorted(paths, key=first) for paths in groups.values()]


def _lock(directory: pathlib.Path) -> int:
  """Locks a directory (flock) while the returned file descriptor is open."""
  file = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    is_locked = os.path.samestat(os.fstat(file), os.stat(directory))
  except (BlockingIOError, FileNotFoundError):
    is_locked = False  # FileNotFoundError: renamed by another process
  except OSError:
    is_locked = True  # a file system without locks
  if not is_locked:
    os.close(file)
    raise ValueError(f"another process is writing to {directory}: wait for it")
  return file


@contextlib.contextmanager
def new_directory(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a directory to fill, which becomes `path` if the context succeeds.

  ValueError if `path` exists, or if another process or user is filling it.
  """
  path = pathlib.Path(path)
  exists = f"{path} exists already; remove it or choose another path"
  if os.path.lexists(path):
    raise ValueError(exists)
  partial = path.with_name(path.name + ".partial")
  partial.parent.mkdir(parents=True, exist_ok=True)
  try:
    partial.mkdir()
  except FileExistsError:
    about = partial.lstat()  # check the owner: its files will be removed
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
      text = f"{partial} is a link, a file or owned by another user: remove it"
      raise ValueError(text) from None
  lock = _lock(partial)
  try:
    for file in partial.iterdir():  # left by a killed process
      file.unlink()
    yield partial
    if os.path.lexists(path):  # a rename would replace an empty directory
      raise ValueError(exists)
    partial.rename(path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  finally:
    os.close(lock)


def follow(layout: Mapping[str, Leaf], arrays: Mapping[str, Any]) -> None:
  """Takes part in the collective fetches of another process's `write`."""
  for _ in _all_tensors(layout, arrays, None):
    pass


def write(
  directory: pathlib.Path,
  layout: Mapping[str, Leaf],
  arrays: Mapping[str, Any],
  dtype: Any = None,
  max_shard_size: int | None = None,
  single: str = SINGLE,
) -> None:
  """Writes arrays to a file, or to several and an index if it is too large.

  A tensor of more than `max_shard_size` bytes gets its own file. `dtype` is the
  dtype to store; None keeps each array's.
  """
  entries = {
    name: (np.dtype(dtype or arrays[path].dtype), leaf.stored_shape)
    for path, leaf in layout.items()
    for name in leaf.names
  }
  sizes = {n: math.prod(s) * d.itemsize for n, (d, s) in entries.items()}
  tensors = _all_tensors(layout, arrays, dtype)
  shards = _shards(sizes, max_shard_size)
  file_of = {}
  for i, names in enumerate(shards, start=1):
    file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    file = single if len(shards) == 1 else file
    with open(directory / file, "wb") as stream:
      _write_header(stream, {name: entries[name] for name in names})
      for name in names:
        stream.write(next(tensors).view(np.uint8))
        file_of[name] = file
  if len(shards) > 1:
    index = {
      "metadata": {"total_size": sum(sizes.values())},
      "weight_map": dict(sorted(file_of.items())),
    }
    text = json.dumps(index, indent=2) + "\n"
    (directory / INDEX).write_text(text)
