"""Log-probabilities of completions, computed on packed rows (`packing`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core.logprobs import Reference, TokenLogprobs, logprobs_and_load
from grpojax.core.packing import Rows
from grpojax.core.packing.flat_tokens import FlatTokens, by_device, find_tokens
from grpojax.core.rows import map_rows
from grpojax.core.types import LM, Params, Tokens


def _pack(
  values: Shaped[Array, "U G T *more"],
  addresses: Int[Array, "devices n"],
  rows: Rows,
) -> Shaped[Array, "K 1 W *more"]:
  """Puts the samples' tokens into rows; padding has arbitrary values."""
  more = values.shape[3:]
  samples = values.reshape(rows.sizes.devices, -1, *more)
  # A device's samples are one axis of tokens; padding (-1) reads one of them.
  x = jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(samples, addresses)
  return x.reshape(-1, 1, rows.sample_of_token.shape[-1], *more)


def _unpack(
  values: Shaped[Array, "devices n *more"],
  addresses: Int[Array, "devices n"],
  shape: tuple[int, int, int],
) -> Shaped[Array, "U G T *more"]:
  """Puts tokens into their samples [U, G, T]; 0 on padding."""
  size = math.prod(shape) // len(values)
  more = values.shape[2:]
  # -1 would be the last token; `size` is out of range and dropped.
  addresses = jnp.where(addresses < 0, size, addresses)
  zeros = jnp.zeros((size, *more), values.dtype)
  put = lambda x, at: zeros.at[at].set(x, mode="drop")
  return jax.vmap(put)(values, addresses).reshape(*shape, *more)


def _mask_idle_prompts(
  prompt_mask: Bool[Array, "U P"], rows: Rows
) -> Bool[Array, "U P"]:
  """Sets the mask to False for prompts without a row."""
  devices = rows.sizes.devices
  prompt_of_row = by_device(rows.prompt_of_row, devices)
  real = by_device(jnp.any(rows.sample_of_token >= 0, axis=-1), devices)
  prompts = by_device(prompt_mask, devices)
  # [devices, U, rows]: a prompt stays if a row of it has a token.
  is_its_row = prompt_of_row[:, None] == jnp.arange(prompts.shape[1])[:, None]
  prompts &= jnp.any(is_its_row & real[:, None], axis=-1, keepdims=True)
  return prompts.reshape(prompt_mask.shape)


def completion_logprobs(
  lm: LM,
  params: Params,
  tokens: Tokens,
  rows: Rows | None = None,
  *,
  reference: Reference | None = None,
  **options: Any,
) -> TokenLogprobs:
  """Computes log-probabilities (`logprobs_and_load`), on packed `rows` if any.

  If packed, results [B, G, T] are 0 on padding, and NaN if prompts are longer
  than planned; they do not support `jax.jvp`, and `LM.extend` gets `segments`.
  """
  if rows is None:
    options["reference"] = reference
    return logprobs_and_load(lm, params, tokens, **options)
  sizes = rows.sizes
  shape = tokens.ids.shape
  _, g, t = shape
  sample = rows.sample_of_token[:, None]
  position = rows.position_of_token[:, None]
  # Samples are numbered within their device, and so are their tokens.
  segments = rows.prompt_of_row[:, None, None] * g + sample
  addresses = jnp.where(sample < 0, -1, segments * t + position)
  addresses = addresses.reshape(sizes.devices, -1)

  def pack_samples(x, *axes):
    return _pack(x, addresses, rows) if "group" in axes else x

  tokens = map_rows(pack_samples, tokens)
  if reference is not None:
    ref_hidden = _pack(reference.hidden, addresses, rows)
    reference = reference._replace(hidden=ref_hidden)
  # Unused copies must not take the room of other prompts.
  prompt_mask = _mask_idle_prompts(tokens.prompt_mask, rows)
  # If prompt tokens do not fit, results are NaN instead of silently wrong.
  on_device = prompt_mask.reshape(sizes.devices, -1)
  count = jnp.sum(on_device, axis=1, keepdims=True)
  fits = count <= sizes.prompt_tokens
  flat = FlatTokens(
    find_tokens(prompt_mask[:, None], sizes.devices, sizes.prompt_tokens),
    find_tokens(sample >= 0, sizes.devices, sizes.tokens),
    by_device(rows.prompt_of_row, sizes.devices),
  )
  prompts = tokens.prompt_ids, prompt_mask
  if lm.forward is None:
    # Without `LM.forward`, each row computes its own prompt, with padding.
    prompts = jax.tree.map(flat.of_rows, prompts)
    flat = None
    segments = sample
  else:
    # Flat tokens of a device share one array, so segments count its samples.
    segments = jnp.where(sample < 0, -1, segments)
    # Results are flat, too, so the addresses of rows become those of tokens.
    addresses = jnp.take_along_axis(
      addresses, flat.rows.place_of_token, axis=1, mode="fill", fill_value=-1
    )
  prompt_ids, prompt_mask = prompts
  tokens = tokens.replace(
    prompt_ids=prompt_ids,
    prompt_mask=prompt_mask,
    positions=position,
    segments=segments,
    flat=flat,
  )
  scored = logprobs_and_load(lm, params, tokens, reference=reference, **options)

  # Unpack the results, from rows or flat tokens; the load has no token axis.
  def to_samples(x):
    x = x.reshape(*addresses.shape, *x.shape[3:])
    x = jnp.where(fits.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)
    return _unpack(x, addresses, shape)

  values = scored._replace(load=None)
  return jax.tree.map(to_samples, values)._replace(load=scored.load)
