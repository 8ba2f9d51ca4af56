"""Tokens on their way through the layers: prompts, completions, the next token.

A pass embeds the tokens, runs the layers of all stacks (see `layer_stacks`) and
applies the final norm. Which tokens see which is in the `TokenContext` that it
makes for them. `transformer` makes an `LM` of these functions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core import flat_tokens
from grpojax.core.flat_tokens import FlatTokens
from grpojax.core.load_balancing import ExpertLoad
from grpojax.core.mesh import constrain, sample_cuts
from grpojax.core.types import Params, Prefix
from grpojax.models import cache as cache_lib
from grpojax.models import flat_pass, layer_stacks, token_contexts
from grpojax.models.attention import rms_norm
from grpojax.models.block import block, block_of_both
from grpojax.models.cache import Cache, PromptKeysValues
from grpojax.models.config import TransformerConfig


def _embed(
  config: TransformerConfig,
  params: Params,
  ids: Int[Array, "B G S"],
  dtype: Any,
) -> Float[Array, "B G S D"]:
  """Hidden states before the first layer, float32."""
  x = params["embed"][ids].astype(jnp.float32)
  if config.scaled_embedding:  # transformers rounds the factor
    x = x * jnp.asarray(config.width**0.5, dtype)
  return constrain(x, "batch", "group")


def _embed_both(
  config: TransformerConfig,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  ids: Int[Array, "B G S"],
  dtype: Any,
) -> tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]]:
  """Hidden states of prompts and completions, by one lookup.

  The gradient of a lookup is as large as the table, in float32: with two of
  them XLA held five such arrays at once on a TPU, with one it holds one.
  """
  b, g, s = ids.shape
  if sample_cuts(b, g)[1] > 1:  # or completions would leave their devices
    return tuple(
      _embed(config, params, tokens, dtype)
      for tokens in (prompt_ids[:, None], ids)
    )
  both = jnp.concatenate([prompt_ids, ids.reshape(b, g * s)], axis=1)
  x = _embed(config, params, both[:, None], dtype)
  prompts, x = jnp.split(x, [prompt_ids.shape[1]], axis=2)
  x = x.reshape(b, g, s, -1)
  return tuple(constrain(part, "batch", "group") for part in (prompts, x))


def _final_norm(
  config: TransformerConfig,
  params: Params,
  x: Float[Array, "*tokens D"],
  dtype: Any,
) -> Float[Array, "*tokens D"]:
  """Hidden states as the output head reads them, in `dtype`."""
  scale = params["final_norm"]
  y = rms_norm(x, scale, config.norm_eps, offset=config.norm_offset)
  return y.astype(dtype)


def _lengths(prompt_mask: Bool[Array, "B P"]) -> Int[Array, "B"]:
  return jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)


def _last_hidden(
  config: TransformerConfig,
  params: Params,
  x: Float[Array, "B 1 P D"],
  prompt_mask: Bool[Array, "B P"],
  dtype: Any,
) -> Float[Array, "B D"]:
  """The final hidden state at the last real token of each prompt."""
  index = (_lengths(prompt_mask) - 1)[:, None, None]
  last = jnp.take_along_axis(x[:, 0], index, axis=1)
  return _final_norm(config, params, last[:, 0], dtype)


def prefill(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
) -> Prefix:
  """Runs the prompts as rows of a group of one, and keeps keys and values."""
  context = token_contexts.of_prompts(config, prompt_mask)

  def body(x, local, layer):
    x, row, _ = layer_step(block, config, x, layer, local, context, None, None)
    return x, cache_lib.of_prompt(row)

  x = _embed(config, params, prompt_ids[:, None], dtype)
  x, keys_values = layer_stacks.scan(config, body, x, params)
  return Prefix(
    last_hidden=_last_hidden(config, params, x, prompt_mask, dtype),
    length=_lengths(prompt_mask),
    state=(keys_values, prompt_mask),
  )


def map_prefix_rows(function: Callable[..., Array], prefix: Prefix) -> Prefix:
  """Maps a function of arrays [B, ...] over prompts, see `LM`."""
  keys_values, prompt_mask = prefix.state
  return Prefix(
    function(prefix.last_hidden),
    function(prefix.length),
    (cache_lib.map_prompts(function, keys_values), function(prompt_mask)),
  )


def _extend_rows(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  params: Params,
  x: Float[Array, "B G S D"],
  positions: Int[Array, "B G S"],
  segments: Int[Array, "B G S"] | None,
  keys_values: tuple[PromptKeysValues, ...],
  prompt_mask: Bool[Array, "B P"],
) -> Float[Array, "B G S D"]:
  """Whole completions through all layers: training, nothing is kept.

  The layers are scanned, so that the program does not grow with their number.
  """
  context = token_contexts.of_rows(config, positions, segments, prompt_mask)

  def body(x, local, layer, prompt):
    x, *_ = layer_step(block, config, x, layer, local, context, prompt, None)
    return x, None

  return layer_stacks.scan(config, body, x, params, keys_values)[0]


def _extend_cached(
  config: TransformerConfig,
  params: Params,
  x: Float[Array, "B G S D"],
  lengths: Int[Array, "B G"] | None,
  positions: Int[Array, "B G S"],
  cache: Cache,
  keys_values: tuple[PromptKeysValues, ...],
  prompt_mask: Bool[Array, "B P"],
) -> tuple[Float[Array, "B G S D"], Cache]:
  """The next tokens through all layers, and the cache with them in it.

  The layers only read the cache; all tokens are written at the end, in place.

  `lengths` says how many tokens each row has in the cache; None where all have
  as many as were written.
  """
  context = token_contexts.of_next(
    config, params, cache, lengths, positions, prompt_mask
  )

  def body(x, local, layer, prompt, slots):
    return block(config, x, layer, local, context, prompt, slots)[:2]

  slots = tuple(zip(*cache.blocks, strict=True))  # of each stack its blocks
  x, tokens = layer_stacks.scan(config, body, x, params, keys_values, slots)
  return x, cache_lib.write(cache, tokens, last=x)


def extend(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  params: Params,
  prefix: Prefix,
  ids: Int[Array, "B G S"],
  cache: Cache | None,
  positions: Int[Array, "B G S"] | None,
  segments: Int[Array, "B G S"] | None,
) -> tuple[Float[Array, "B G S D"], Cache | None]:
  """Runs completion tokens on from a prefix, see `LM.extend`."""
  if cache is not None and segments is not None:
    raise ValueError("segments are for training rows; decode without them")
  lengths = None if positions is None else positions[..., 0]
  if positions is None:
    start = 0 if cache is None else cache.index
    positions = jnp.broadcast_to(start + jnp.arange(ids.shape[-1]), ids.shape)
  # From here on in the whole sequence. A completion goes on where its prompt's
  # real tokens end: the padding between the two has no positions.
  positions = prefix.length[:, None, None] + positions
  x = _embed(config, params, ids, dtype)
  if cache is None:
    x = _extend_rows(
      config, layer_step, params, x, positions, segments, *prefix.state
    )
  else:
    x, cache = _extend_cached(
      config, params, x, lengths, positions, cache, *prefix.state
    )
  return _final_norm(config, params, x, dtype), cache


def forward(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "n G S"],
  positions: Int[Array, "n G S"] | None = None,
  segments: Int[Array, "n G S"] | None = None,
  flat: FlatTokens | None = None,
  *,
  unroll: bool,
  load_weights: tuple[Float[Array, "B P"], Float[Array, "n G S"]] | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, "*tokens D"], ExpertLoad | None]:
  """Prompts and whole completions layer by layer, see `LM.forward`.

  What the routers did is None unless `load_weights` asks for it.
  """
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
  of_rows = prompt_mask if flat is None else flat.of_rows(prompt_mask)
  positions = _lengths(of_rows)[:, None, None] + positions
  contexts = (
    token_contexts.of_prompts(config, prompt_mask),
    token_contexts.of_rows(config, positions, segments, of_rows),
  )
  if load_weights is not None:
    of_prompts, of_rows = load_weights
    each = of_prompts[:, None], of_rows
    contexts = tuple(
      context._replace(load_weights=x)
      for context, x in zip(contexts, each, strict=True)
    )

  if flat is None:
    x = _embed_both(config, params, prompt_ids, ids, dtype)
    step, context = block_of_both, contexts
  else:
    x = _embed(
      config, params, flat_pass.join(prompt_ids[:, None], ids, flat), dtype
    )
    step, context = (
      flat_pass.block,
      flat_pass.context_of(config, contexts, flat),
    )

  def body(x, local, layer):
    return layer_step(step, config, x, layer, local, context)

  x, loads = layer_stacks.scan(config, body, x, params, unroll=unroll)
  load = jax.tree.map(lambda *x: jnp.sum(jnp.concatenate(x), axis=0), *loads)
  if flat is None:
    prompts, x = x
  else:
    prompts, x = flat_pass.split(x, flat)
    shape = prompt_ids[:, None].shape
    prompts = flat_tokens.unflatten(prompts, flat.prompts, shape)
  last = _last_hidden(config, params, prompts, prompt_mask, dtype)
  return last, _final_norm(config, params, x, dtype), load
