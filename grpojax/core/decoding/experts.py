"""Experts of the sampled tokens, packed into words while they are recorded.

A TPU cannot write a byte by itself, so the small numbers of a token are merged.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer, UInt32

from grpojax.core.types import Prefix


def pack(experts: Integer[Array, "*n X"]) -> UInt32[Array, "*n W"]:
  """Packs small integers into words."""
  *tokens, x = experts.shape
  in_word = 4 // experts.dtype.itemsize
  # Pad X to whole words; the cast then merges the last axis, [*n, W, in_word],
  # unless a number is a word.
  experts = jnp.pad(experts, [*[(0, 0)] * len(tokens), (0, -x % in_word)])
  experts = experts.reshape(*tokens, -1, in_word)
  words = jax.lax.bitcast_convert_type(experts, jnp.uint32)
  return words.reshape(*tokens, -1)


def unpack(
  words: UInt32[Array, "B G T W"] | None, prefix: Prefix
) -> Integer[Array, "B G T X"] | None:
  """Unpacks the experts of completions; returns None for None."""
  if words is None:
    return None
  # The cast adds an axis [..., W, in_word]; the slice drops the words' padding.
  experts = jax.lax.bitcast_convert_type(words, prefix.experts.dtype)
  experts = experts.reshape(*words.shape[:3], -1)
  return experts[..., : prefix.experts.shape[-1]]


def empty(
  prefix: Prefix, shape: tuple[int, int, int]
) -> UInt32[Array, "B G T W"] | None:
  """Returns words for tokens [B, G, T]; None if the prompts have no experts."""
  if prefix.experts is None:
    return None
  *_, w = jax.eval_shape(pack, prefix.experts).shape
  return jnp.zeros((*shape, w), jnp.uint32)


def write(
  words: UInt32[Array, "B G T W"] | None,
  experts: Integer[Array, "B G S X"] | None,
  positions: Int[Array, "B G S"],
  real: Bool[Array, "B G S"],
) -> UInt32[Array, "B G T W"] | None:
  """Records the experts of the next tokens, if any, where they are `real`."""
  if words is None:
    return None
  put = lambda x, new, at: x.at[at].set(new, mode="drop")
  # T is out of range, and such writes are dropped.
  at = jnp.where(real, positions, words.shape[2])
  return jax.vmap(jax.vmap(put))(words, pack(experts), at)
