"""Random keys of the implementation threefry, whatever JAX's default.

Each sample has its own key, so its tokens do not depend on the rest of the
batch. "rbg" and "unsafe_rbg", a usual default on TPUs, would break this: under
`jax.vmap` they draw all rows from the first row's key.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

_THREEFRY = "threefry2x32"


def seed_key(seed: int | Array) -> Key[Array, ""]:
  """Returns the threefry key of a seed."""
  return jax.random.key(seed, impl=_THREEFRY)


def random_key(key: Any) -> Key[Array, ""]:
  """Converts a key of any implementation to a threefry key.

  Threefry keys, typed or as two words, stay the same; the words of other keys
  (rbg) are folded together. ValueError unless it is a single key.
  """
  dtype = getattr(key, "dtype", None)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  raw = dtype == jnp.uint32 and jnp.shape(key) in ((2,), (4,))
  if not raw and not (typed and key.shape == ()):
    raise ValueError(
      f"{key!r} is not a single random key: give jax.random.key(seed)"
    )
  if typed and jax.random.key_impl(key) == _THREEFRY:
    return key
  words = jax.random.key_data(key) if typed else key
  if raw and words.size == 2:
    return jax.random.wrap_key_data(words, impl=_THREEFRY)
  return functools.reduce(jax.random.fold_in, words, seed_key(0))
