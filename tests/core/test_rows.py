"""Rows of records whose fields are inherited, nested, or named by text."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Array, Float

from grpojax.core import rows
from grpojax.core.types import Rollout


class Texts(NamedTuple):  # annotations are texts in this file
  """Prompts and samples."""

  prompts: Float[Array, "B P"]
  samples: Float[Array, "B G"] | None
  targets: Any = None


@dataclasses.dataclass
class Parent:
  """Fields that a subclass inherits."""

  samples: Float[Array, "B G"]


@dataclasses.dataclass
class Child(Parent):
  """Further fields."""

  prompts: Float[Array, "B P"]


def _record(kind, width, **others):
  prompts = np.arange(2.0 * width).reshape(2, width)
  samples = np.arange(6.0).reshape(2, 3)
  return kind(prompts=prompts, samples=samples, **others)


def test_annotations_may_be_texts_or_inherited():
  for kind in (Texts, Child):
    joined = rows.concatenate([_record(kind, 2), _record(kind, 4)])
    assert joined.prompts.shape == (4, 4)
    assert rows.group_shape(joined) == (4, 3)
    second = rows.take(_record(kind, 2), [1])
    np.testing.assert_array_equal(second.prompts, [[2, 3]])
    np.testing.assert_array_equal(second.samples, [[3, 4, 5]])


def test_fields_of_a_rollout_are_inherited():
  @struct.dataclass
  class Scored(Rollout):
    scores: Any = None

  ids = np.arange(6).reshape(2, 3)
  samples = np.arange(24).reshape(2, 3, 4)
  others = samples > 0, samples / 2.0, ids > 0
  record = Scored(ids, ids > 0, samples, *others, scores=ids)
  taken = rows.take(record, [1])
  np.testing.assert_array_equal(taken.completion_ids, samples[1:])
  np.testing.assert_array_equal(taken.scores, ids[1:])


def test_fields_may_be_nested_dictionaries():
  targets = {"b": {"z": np.arange(2), "a": np.arange(2)}, "a": [["x"], ["y"]]}
  taken = rows.take(_record(Texts, 2, targets=targets), [1]).targets
  assert [*taken] == ["b", "a"] and [*taken["b"]] == ["z", "a"]
  assert taken["a"] == [["y"]]
  np.testing.assert_array_equal(taken["b"]["z"], [1])
