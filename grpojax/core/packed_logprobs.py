"""Log-probabilities of completions, computed on packed rows."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core import flat_tokens
from grpojax.core import logprobs as logprobs_lib
from grpojax.core.flat_tokens import FlatTokens
from grpojax.core.packing import Rows
from grpojax.core.types import LM, Params


def _places(ids: Shaped[Array, "U G T"], rows: Rows) -> Int[Array, "devices n"]:
  """Of each token in rows its place in the samples of its device; -1: none."""
  _, g, t = ids.shape
  sample = rows.owners[..., None] * g + rows.segments
  place = jnp.where(rows.segments < 0, -1, sample * t + rows.positions)
  return place.reshape(rows.part.devices, -1)


def pack(values: Shaped[Array, "U G T"], rows: Rows) -> Shaped[Array, "K 1 W"]:
  """The samples' tokens as rows; on padding stands any of them."""
  index, devices = _places(values, rows), rows.part.devices
  found = jnp.take_along_axis(
    values.reshape(devices, -1), index, axis=1, mode="clip"
  )
  return found.reshape(-1, 1, rows.segments.shape[-1])


def _unpack(
  values: Shaped[Array, "devices n"],
  places: Int[Array, "devices n"],
  shape: tuple[int, int, int],
) -> Shaped[Array, "U G T"]:
  """Tokens in their samples; 0 where there is none."""
  size = math.prod(shape) // len(values)
  places = jnp.where(places < 0, size, places)
  put = lambda x, at: jnp.zeros(size, x.dtype).at[at].set(x, mode="drop")
  return jax.vmap(put)(values, places).reshape(shape)


def _by_device(x: Array, rows: Rows) -> Array:
  """[n, ...] -> [devices, n / devices, ...]."""
  return x.reshape(rows.part.devices, -1, *x.shape[1:])


def _of_rows(x: Shaped[Array, "U *more"], rows: Rows) -> Array:
  """What is of prompts, for the rows that are theirs: [K, ...]."""
  look_up = lambda x, owners: x[owners]
  found = jax.vmap(look_up)(_by_device(x, rows), _by_device(rows.owners, rows))
  return found.reshape(-1, *x.shape[1:])


def _read(prompt_mask: Bool[Array, "U P"], rows: Rows) -> Bool[Array, "U P"]:
  """The tokens of prompts that have a row here; others are left over."""
  owners = _by_device(rows.owners, rows)
  real = _by_device(jnp.any(rows.segments >= 0, axis=-1), rows)
  prompts = _by_device(prompt_mask, rows)
  index = jnp.arange(prompts.shape[1])[:, None]
  own = (owners[:, None] == index) & real[:, None]
  prompts &= jnp.any(own, axis=-1, keepdims=True)
  return prompts.reshape(prompt_mask.shape)


def _flat(prompt_mask: Bool[Array, "U P"], rows: Rows) -> FlatTokens:
  """Where the real tokens of a part are."""
  part = rows.part
  return FlatTokens(
    flat_tokens.places(prompt_mask[:, None], part.devices, part.prompt_tokens),
    flat_tokens.places(rows.segments[:, None] >= 0, part.devices, part.tokens),
    _by_device(rows.owners, rows),
  )


def _fit(
  prompt_mask: Bool[Array, "U P"], rows: Rows
) -> Bool[Array, "devices 1"]:
  """Whether prompts are as short as the layout was told, or tokens are lost."""
  on_device = prompt_mask.reshape(rows.part.devices, -1)
  count = jnp.sum(on_device, axis=1, keepdims=True)
  return count <= rows.part.prompt_tokens


def completion_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G T"],
  rows: Rows | None = None,
  load_weights: tuple[Array, Array] | None = None,
  **options: Any,
) -> tuple[Any, ...]:
  """`token_logprobs`, computed on packed rows where there are such.

  Args:
    lm: see `token_logprobs`; packed, its `extend` must know `segments`.
    params: its parameters.
    prompt_ids: right-padded prompts.
    prompt_mask: True on real prompt tokens.
    ids: completions.
    rows: of these completions, or None.
    load_weights: of prompts and completions, [B, P] and [B, G, T].
    **options: `sampling`, `chunk_size` and `entropy_gradient` of
      `token_logprobs`.

  Returns:
    What `token_logprobs` does, [B, G, T]; packed, 0 on padding, and NaN where
    prompts are longer than the layout was told. Packed, there is no forward
    mode (`jax.jvp`) through them.
  """
  score = functools.partial(logprobs_lib.token_logprobs, lm, params, **options)
  if rows is None:
    return score(prompt_ids, prompt_mask, ids, load_weights=load_weights)
  places = _places(ids, rows)
  segments, positions = rows.segments[:, None], rows.positions[:, None]
  given = dict(positions=positions, samples=ids)
  if load_weights is not None:
    of_prompts, of_tokens = load_weights
    of_tokens = jnp.where(segments >= 0, pack(of_tokens, rows), 0.0)
    given["load_weights"] = of_prompts, of_tokens
  prompts = prompt_ids, _read(prompt_mask, rows)
  fit = _fit(prompts[1], rows)
  if lm.forward is None:  # all that it can share is a row's prompt
    prompts, given["samples"] = jax.tree.map(
      lambda x: _of_rows(x, rows), (prompts, ids)
    )
    given["segments"] = segments
  else:
    given["flat"] = flat = _flat(prompts[1], rows)
    # The sample on its device, as which `first_places` counts it there.
    own = rows.owners[:, None, None] * ids.shape[1] + segments
    given["segments"] = jnp.where(segments < 0, -1, own)
    real = flat.rows.place < places.shape[1]
    index = jnp.minimum(flat.rows.place, places.shape[1] - 1)
    found = jnp.take_along_axis(places, index, axis=1)
    places = jnp.where(real, found, -1)
  logprobs, entropy, *load = score(*prompts, pack(ids, rows), **given)
  each = (
    _unpack(jnp.where(fit, x.reshape(places.shape), jnp.nan), places, ids.shape)
    for x in (logprobs, entropy)
  )
  return *each, *load
