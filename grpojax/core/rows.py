"""Rows of records: prompts [B, ...] and their samples [B, G, ...].

The annotation of a record's field (`Rollout`, `Batch`, ...) says whether it is
of prompts ("B P") or of samples ("B G", "B G T"). These functions move rows of
any record and know no field by name. On the host a field may also be a list of
B rows, or a dictionary of arrays.
"""

import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpojax.core import meshes

Record = TypeVar("Record")


@functools.cache
def _dimensions(kind: type) -> dict[str, list[str]]:
  """Returns the names of the dimensions of each field; [] if not annotated."""
  annotations = typing.get_type_hints(kind)
  if not annotations:  # `typing.no_type_check`
    for base in reversed(kind.__mro__):
      annotations |= inspect.get_annotations(base)
  dimensions = {}
  for name, annotation in annotations.items():
    kinds = annotation, *typing.get_args(annotation)
    texts = (getattr(x, "dim_str", "") for x in kinds)
    dimensions[name] = next(filter(None, texts), "").split()
  return dimensions


def _is_of_samples(dimensions: Sequence[str]) -> bool:
  return dimensions[:2] == ["B", "G"]


def _map(function: Callable[..., Any], *records: Record) -> Record:
  """Maps `function(dimensions, *values)` over arrays and lists of records."""
  first, *_ = records
  mapped = {}
  for name, dimensions in _dimensions(type(first)).items():
    values = [getattr(record, name) for record in records]
    mapped[name] = _map_field(functools.partial(function, dimensions), *values)
  if dataclasses.is_dataclass(first):
    return dataclasses.replace(first, **mapped)
  return first._replace(**mapped)


def _map_field(function: Callable[..., Any], *values: Any) -> Any:
  """Maps a function over the arrays and lists of a field of some records."""
  if isinstance(values[0], dict):  # `jax.tree.map` would sort the names
    return {
      key: _map_field(function, *(x[key] for x in values)) for key in values[0]
    }
  is_row_list = lambda x: isinstance(x, list)
  return jax.tree.map(function, *values, is_leaf=is_row_list)


def map_rows(function: Callable[..., Any], record: Record) -> Record:
  """Maps `function(array, *axes)`, say `meshes.constrain`, over all arrays.

  `axes` names the axes of rows: "batch" and, of samples, "group".
  """

  def of_field(dimensions, x):
    if isinstance(x, list):
      return x
    return function(x, "batch", *["group"] * _is_of_samples(dimensions))

  return _map(of_field, record)


def group_shape(record: Any) -> tuple[int, int]:
  """Returns B and G, the numbers of prompts and of samples per prompt."""
  fields = _dimensions(type(record)).items()
  samples = (getattr(record, name) for name, d in fields if _is_of_samples(d))
  return next(x.shape[:2] for x in samples if x is not None)


def constrain(record: Record) -> Record:
  """Shards a record over the mesh in context."""
  return map_rows(meshes.constrain, record)


def place(record: Record, mesh: Mesh) -> Record:
  """Puts a record, equal in all processes, on a mesh."""
  return map_rows(lambda x, *axes: meshes.place(x, mesh, *axes), record)


def take(record: Record, rows: Any) -> Record:
  """Takes the prompts with these indices, and their samples."""
  each = lambda x: [x[i] for i in rows] if isinstance(x, list) else x[rows]
  return _map(lambda _, x: each(x), record)


def concatenate(records: Sequence[Record]) -> Record:
  """Joins the rows of records; prompts are padded to the longest."""

  def join(dimensions, *values):
    if isinstance(values[0], list):
      return list(itertools.chain(*values))
    library = np if isinstance(values[0], np.ndarray) else jnp
    if dimensions[1:2] == ["P"]:
      longest = max(x.shape[1] for x in values)
      values = [_padded(library, x, longest) for x in values]
    return library.concatenate(values)

  return _map(join, *records)


def _padded(library: Any, x: Any, length: int) -> Any:
  """Pads axis 1, of a prompt's tokens, with zeros."""
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, length - x.shape[1])
  return library.pad(x, widths)
