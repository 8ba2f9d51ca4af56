"""One group-native decoder for all families of models.

The group is an axis of the computation: a prompt's keys and values are computed
and stored once, and its whole group of completions attends to them. Attention
therefore has two parts, prompt and own completion, merged by their
log-sum-exps; training and decoding use the same block.

Parameters are nested dicts; those of the layers are stacked on a leading axis,
as one stack or, where some of them are held apart (see `last_layers`), as a
tuple of stacks that follow each other.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.types import LM, Params, Prefix
from grpojax.models import cache as cache_lib
from grpojax.models import layer_stacks
from grpojax.models.attention import rms_norm, soft_cap
from grpojax.models.block import TokenContext, block
from grpojax.models.cache import Cache, PromptKeysValues
from grpojax.models.config import TransformerConfig as TransformerConfig
from grpojax.models.config import check, init
from grpojax.models.config import parameter_shapes as parameter_shapes
from grpojax.models.layer_stacks import last_layers as last_layers
from grpojax.models.rope import rope_tables


def _in_float32(name: str) -> bool:
  """Whether a parameter is used as it is, whatever the dtype of computation.

  The gradients of a scale, a bias and an embedding are sums over all tokens,
  of rows and not of products as a matrix's, and are summed in the dtype of
  what is used: in bfloat16 thousands of tokens add up to a wrong sum. A router
  chooses among the experts by the order of its logits: rounded, it would send
  tokens to other experts (see `moe.route`).
  """
  return name.endswith(("norm", "bias")) or name in ("embed", "router")


def _embed(
  config: TransformerConfig,
  params: Params,
  ids: Int[Array, "*tokens"],
  dtype: Any,
) -> Float[Array, "*tokens D"]:
  """Hidden states before the first layer, float32."""
  x = params["embed"][ids].astype(jnp.float32)
  if config.scaled_embedding:  # transformers rounds the factor
    x = x * jnp.asarray(config.width**0.5, dtype)
  return x


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


def _token_context(
  config: TransformerConfig,
  mask: Bool[Array, "..."],
  positions: Int[Array, "B G S"],
  key_positions: Int[Array, "B G C"],
  prompt_mask: Bool[Array, "B P"] | None,
) -> TokenContext:
  """Adds the rotary tables, which are the same in all layers of a kind."""
  tables = tuple(
    rope_tables(positions, config.head_dim, rope) for rope in config.ropes
  )
  return TokenContext(tables, mask, positions, key_positions, prompt_mask)


def _prefill(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
) -> Prefix:
  """Runs the prompts as rows of a group of one, and keeps keys and values."""
  b, p = prompt_ids.shape
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  # Causal, and no padding as a key: [B, P, P]. A padded query may see no real
  # key but those before it; what it computes is never read.
  mask = jnp.tril(jnp.ones((p, p), bool)) & prompt_mask[:, None, :]
  mask = mask[:, None, None, None]  # all heads of the one row
  context = _token_context(config, mask, positions, positions, None)

  def body(x, layer, local):
    x, row = layer_step(config, x, layer, local, context, None, None, None)
    return x, cache_lib.of_prompt(row)

  x = _embed(config, params, prompt_ids, dtype)[:, None]
  x, keys_values = layer_stacks.scan(config, body, x, params)
  length = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)
  last = jnp.take_along_axis(x[:, 0], (length - 1)[:, None, None], axis=1)
  return Prefix(
    last_hidden=_final_norm(config, params, last[:, 0], dtype),
    length=length,
    state=(keys_values, prompt_mask),
  )


def _row_mask(
  size: int, segments: Int[Array, "B G S"] | None
) -> Bool[Array, "..."]:
  """Causal along the row, and within a segment where there are several."""
  mask = jnp.tril(jnp.ones((size, size), bool))
  if segments is not None:
    mask = mask & (segments[..., :, None] == segments[..., None, :])
    mask = mask[:, :, None, None]  # all heads: [B, G, 1, 1, S, S]
  return mask


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
  mask = _row_mask(x.shape[2], segments)
  context = _token_context(config, mask, positions, positions, prompt_mask)

  def body(x, layer, local, prompt):
    x, _ = layer_step(config, x, layer, local, context, prompt, None, None)
    return x, None

  return layer_stacks.scan(config, body, x, params, keys_values)[0]


def _extend_cached(
  config: TransformerConfig,
  params: Params,
  x: Float[Array, "B G S D"],
  positions: Int[Array, "B G S"],
  cache: Cache,
  keys_values: tuple[PromptKeysValues, ...],
  prompt_mask: Bool[Array, "B P"],
) -> tuple[Float[Array, "B G S D"], Cache]:
  """The next tokens through all layers, and the cache with them in it.

  The layers are unrolled: a scan would take the cache apart and put it together
  again, and copy it for that, while here the decode loop updates each layer's
  slots in place.
  """
  context = _token_context(
    config,
    cache_lib.visible(cache, x.shape[2]),
    positions,
    cache_lib.slot_positions(cache, positions),
    prompt_mask,
  )
  # One (parameters, prompt's keys and values) a layer, across the stacks.
  stacks = zip(layer_stacks.stacks(params), keys_values, strict=True)
  layers_prompts = itertools.chain.from_iterable(
    map(layer_stacks.unstack, stacks)
  )
  filled = []
  for (layer, prompt), local, slots in zip(
    layers_prompts, config.locality, cache.layers, strict=True
  ):
    x, slots = block(
      config, x, layer, local, context, prompt, slots, cache.index
    )
    filled.append(slots)
  return x, Cache(cache.index + x.shape[2], tuple(filled))


def _extend(
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
      config, params, x, positions, cache, *prefix.state
    )
  return _final_norm(config, params, x, dtype), cache


def _unembed(
  config: TransformerConfig,
  params: Params,
  hidden: Float[Array, "*tokens D"],
  dtype: Any,
) -> Float[Array, "*tokens V"]:
  """Logits in float32, whatever the dtype of computation."""
  if config.labels:
    head = params["score"]
  else:
    head = params["embed"].T if config.tied else params["head"]
  logits = jnp.matmul(
    hidden, head.astype(dtype), preferred_element_type=jnp.float32
  )
  return logits if config.labels else soft_cap(logits, config.logits_cap)


def transformer(
  config: TransformerConfig, *, dtype=jnp.float32, remat: bool = False
) -> LM:
  """The decoder as an `LM`.

  Args:
    config: shape of the model.
    dtype: of matrix products and cache; hidden states between the layers,
      norms, rotations, softmax and logits are float32.
      Parameters may be float32 beside it (an optimizer needs that: a small
      update of a bfloat16 weight rounds to nothing) and are cast where used.
    remat: recompute each layer in the backward pass instead of storing its
      activations (less memory, about a third more work).

  Raises:
    ValueError: a configuration whose parts do not fit, see `config.check`.
  """
  check(config)
  layer_step = block
  if remat:  # under a scan nothing else can be merged with the recomputation
    # Where no two layers differ, `local` is a Python value.
    static = (0, 3) if len(set(config.locality)) == 1 else (0,)
    layer_step = jax.checkpoint(block, static_argnums=static, prevent_cse=False)

  def cast(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x if _in_float32(path[-1].key) else x.astype(dtype),
      params,
    )

  def prefill(params, prompt_ids, prompt_mask):
    args = (cast(params), prompt_ids, prompt_mask)
    return _prefill(config, layer_step, dtype, *args)

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    args = (cast(params), prefix, ids, cache, positions, segments)
    return _extend(config, layer_step, dtype, *args)

  def unembed(params, hidden):
    return _unembed(config, params, hidden, dtype)

  def init_cache(batch, group_size, capacity):
    return cache_lib.create(
      batch,
      group_size,
      capacity,
      layers=config.layers,
      kv_heads=config.kv_heads,
      head_dim=config.head_dim,
      dtype=dtype,
    )

  return LM(
    init=functools.partial(init, config),
    prefill=prefill,
    extend=extend,
    unembed=unembed,
    init_cache=init_cache,
  )
