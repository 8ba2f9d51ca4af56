"""Log-probabilities of completions, computed on packed rows (`packing`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core import flat_tokens
from grpojax.core.flat_tokens import FlatTokens
from grpojax.core.logprobs import TokenLogprobs, logprobs_and_load
from grpojax.core.packing import Rows
from grpojax.core.types import LM, Params


def _by_device(x: Array, rows: Rows) -> Array:
  """[n, ...] -> [devices, n / devices, ...]."""
  return x.reshape(rows.sizes.devices, -1, *x.shape[1:])


def _place_of_token(
  ids: Shaped[Array, "U G T"], rows: Rows
) -> Int[Array, "devices n"]:
  """Returns each row token's place in the samples of its device; -1: none."""
  _, g, t = ids.shape
  sample = rows.prompt_of_row[..., None] * g + rows.sample_of_token
  place = sample * t + rows.position_of_token
  place = jnp.where(rows.sample_of_token < 0, -1, place)
  return place.reshape(rows.sizes.devices, -1)


def _pack(
  values: Shaped[Array, "U G T"],
  place_of_token: Int[Array, "devices n"],
  rows: Rows,
) -> Shaped[Array, "K 1 W"]:
  """Puts the samples' tokens into rows; on padding stands any of them."""
  samples = values.reshape(rows.sizes.devices, -1)
  x = jnp.take_along_axis(samples, place_of_token, axis=1, mode="clip")
  return x.reshape(-1, 1, rows.sample_of_token.shape[-1])


def _unpack(
  values: Shaped[Array, "devices n"],
  place_of_token: Int[Array, "devices n"],
  shape: tuple[int, int, int],
) -> Shaped[Array, "U G T"]:
  """Puts tokens into their samples [U, G, T]; 0 where there is none."""
  size = math.prod(shape) // len(values)
  place = jnp.where(place_of_token < 0, size, place_of_token)
  put = lambda x, at: jnp.zeros(size, x.dtype).at[at].set(x, mode="drop")
  return jax.vmap(put)(values, place).reshape(shape)


def _prompts_of_rows(x: Shaped[Array, "U *more"], rows: Rows) -> Array:
  """Repeats values of prompts for each of their rows: [K, ...]."""
  look_up = lambda x, prompt_of_row: x[prompt_of_row]
  by_device = _by_device(x, rows), _by_device(rows.prompt_of_row, rows)
  return jax.vmap(look_up)(*by_device).reshape(-1, *x.shape[1:])


def _mask_idle_prompts(
  prompt_mask: Bool[Array, "U P"], rows: Rows
) -> Bool[Array, "U P"]:
  """Leaves tokens to those prompts alone that have a row."""
  prompt_of_row = _by_device(rows.prompt_of_row, rows)
  real = _by_device(jnp.any(rows.sample_of_token >= 0, axis=-1), rows)
  by_device = _by_device(prompt_mask, rows)
  prompt = jnp.arange(by_device.shape[1])[:, None]
  own = (prompt_of_row[:, None] == prompt) & real[:, None]
  by_device &= jnp.any(own, axis=-1, keepdims=True)
  return by_device.reshape(prompt_mask.shape)


def _flat_tokens(prompt_mask: Bool[Array, "U P"], rows: Rows) -> FlatTokens:
  """Finds the real tokens of prompts and rows."""
  sizes, real = rows.sizes, rows.sample_of_token >= 0
  find = flat_tokens.find_tokens
  return FlatTokens(
    find(prompt_mask[:, None], sizes.devices, sizes.prompt_tokens),
    find(real[:, None], sizes.devices, sizes.tokens),
    _by_device(rows.prompt_of_row, rows),
  )


def completion_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G T"],
  rows: Rows | None = None,
  load_weights: tuple[Array, Array] | None = None,
  **options: Any,
) -> TokenLogprobs:
  """Computes `token_logprobs`, on packed rows where there are such.

  Args:
    lm: The model; packed, its `extend` must know `segments`.
    params: Its parameters.
    prompt_ids: Right-padded prompts.
    prompt_mask: True on real prompt tokens.
    ids: Completions.
    rows: Rows of these completions, or None.
    load_weights: Weights of prompts [B, P] and completions [B, G, T], see
      `LM.forward_with_load`.
    **options: `sampling`, `chunk_size` and `entropy_gradient` of
      `token_logprobs`.

  Returns:
    Log-probabilities and entropies [B, G, T], and the routers' load where there
    are weights. Packed, they are 0 on padding, and NaN where prompts are longer
    than the packing knows; there is no forward mode (`jax.jvp`) through them.
  """
  if rows is None:
    return logprobs_and_load(
      lm, params, prompt_ids, prompt_mask, ids, load_weights, **options
    )
  sample, position = rows.sample_of_token[:, None], rows.position_of_token
  place_of_token = _place_of_token(ids, rows)
  if load_weights is not None:
    of_prompts, of_tokens = load_weights
    of_tokens = _pack(of_tokens, place_of_token, rows)
    load_weights = of_prompts, jnp.where(sample >= 0, of_tokens, 0.0)
  prompt_mask = _mask_idle_prompts(prompt_mask, rows)
  # With more real prompt tokens than there is room for, some would be lost.
  on_device = prompt_mask.reshape(rows.sizes.devices, -1)
  count = jnp.sum(on_device, axis=1, keepdims=True)
  fits = count <= rows.sizes.prompt_tokens
  packed_ids, samples, flat = _pack(ids, place_of_token, rows), ids, None
  if lm.forward is None:  # rows are prompts of their own, each computed anew
    segments = sample
    prompt_ids, prompt_mask, samples = (
      _prompts_of_rows(x, rows) for x in (prompt_ids, prompt_mask, ids)
    )
  else:
    flat = _flat_tokens(prompt_mask, rows)
    # Flat tokens are of all prompts on a device, and so are their samples.
    segments = rows.prompt_of_row[:, None, None] * ids.shape[1] + sample
    segments = jnp.where(sample < 0, -1, segments)
    place_of_token = jnp.take_along_axis(
      place_of_token,
      flat.rows.place_of_token,
      axis=1,
      mode="fill",
      fill_value=-1,
    )
  logprobs, entropy, load = logprobs_and_load(
    lm,
    params,
    prompt_ids,
    prompt_mask,
    packed_ids,
    load_weights,
    positions=position[:, None],
    segments=segments,
    samples=samples,
    flat=flat,
    **options,
  )
  logprobs, entropy = (
    _unpack(
      jnp.where(fits, x.reshape(place_of_token.shape), jnp.nan),
      place_of_token,
      ids.shape,
    )
    for x in (logprobs, entropy)
  )
  return TokenLogprobs(logprobs, entropy, load)
