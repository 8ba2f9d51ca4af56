"""Checksums of arrays, against the formula in Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.runtime.checkpoint import stored_arrays

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool")


def mix(word):
  word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
  return word ^ word >> 13


def expected(array):
  array = np.ascontiguousarray(array)
  words = array.view(f"u{array.itemsize}").ravel().tolist()
  return sum(mix(w) * (mix(i) | 1) for i, w in enumerate(words)) % 2**32


def random_array(shape, dtype):
  values = np.random.default_rng(0).integers(-100, 100, shape)
  return (values > 0 if dtype == "bool" else values).astype(jnp.dtype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_follow_the_formula(dtype):
  for shape in ((5, 3, 7), (), (0,)):
    array = random_array(shape, dtype)
    assert int(stored_arrays.checksum(array)) == expected(array)


def test_checksums_of_64_bit_numbers(float64):
  array = np.arange(12.0).reshape(3, 4) / 7
  halves = array.view(np.uint32)
  assert int(stored_arrays.checksum(jnp.asarray(array))) == expected(halves)


def test_checksums_do_not_depend_on_the_sharding():
  devices = np.array(jax.devices()[:4]).reshape(-1, 1)
  mesh = jax.sharding.Mesh(devices, ("x", "y"))
  array = random_array((8, 4), "float32")
  for spec in (("x", None), ("y", "x"), (None, ("x", "y"))):
    spec = jax.sharding.PartitionSpec(*spec)
    sharded = jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
    sums = stored_arrays.checksums({"a": [sharded], "b": None})
    assert sums == {"a/0": f"{expected(array):08x}"}
