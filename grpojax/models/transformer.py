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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.mesh import constrain
from grpojax.core.types import LM, Params, Prefix
from grpojax.models import cache as cache_lib
from grpojax.models import layer_stacks, sharding
from grpojax.models.attention import rms_norm, soft_cap
from grpojax.models.block import TokenContext, block
from grpojax.models.block_attention import BLOCK
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
  ids: Int[Array, "B G S"],
  dtype: Any,
) -> Float[Array, "B G S D"]:
  """Hidden states before the first layer, float32."""
  x = params["embed"][ids].astype(jnp.float32)
  if config.scaled_embedding:  # transformers rounds the factor
    x = x * jnp.asarray(config.width**0.5, dtype)
  return constrain(x, "batch", "group")


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
  mask: Bool[Array, "..."] | None,
  positions: Int[Array, "B G S"],
  prompt_mask: Bool[Array, "B P"] | None,
) -> TokenContext:
  """Adds the rotary tables, which are the same in all layers of a kind."""
  tables = tuple(
    rope_tables(positions, config.head_dim, rope) for rope in config.ropes
  )
  return TokenContext(tables, mask, positions, prompt_mask)


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
  # Causal alone: padding stands behind all real tokens, which do not see it,
  # and what is computed of it is never read.
  mask = _row_mask(p, None) if p <= BLOCK else None
  context = _token_context(config, mask, positions, None)

  def body(x, local, layer):
    x, row = layer_step(config, x, layer, local, context, None, None)
    return x, cache_lib.of_prompt(row)

  x = _embed(config, params, prompt_ids[:, None], dtype)
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
  # Longer rows are attended to in blocks, and need no whole mask.
  mask = _row_mask(x.shape[2], segments) if x.shape[2] <= BLOCK else None
  context = _token_context(config, mask, positions, prompt_mask)
  context = context._replace(segments=segments)

  def body(x, local, layer, prompt):
    x, _ = layer_step(config, x, layer, local, context, prompt, None)
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
  """The next tokens through all layers, and the cache with them in it."""
  size = x.shape[2]
  context = _token_context(
    config, _row_mask(size, None), positions, prompt_mask
  )._replace(
    slot_mask=cache_lib.filled(cache),
    slot_positions=cache_lib.slot_positions(cache, positions),
  )

  def body(x, local, layer, prompt, slots):
    return block(config, x, layer, local, context, prompt, slots)

  x, rows = layer_stacks.scan(
    config, body, x, params, keys_values, cache.stacks
  )
  return x, cache_lib.write(cache, rows, size)


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
    head = params["head"] if "head" in params else params["embed"].T
  logits = jnp.matmul(
    hidden, head.astype(dtype), preferred_element_type=jnp.float32
  )
  return logits if config.labels else soft_cap(logits, config.logits_cap)


def _cast(params: Params, dtype: Any) -> Params:
  """Parameters as the matrix products read them."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x if _in_float32(path[-1].key) else x.astype(dtype), params
  )


def _for_decoding(
  config: TransformerConfig, params: Params, dtype: Any
) -> Params:
  """Parameters as the token loop reads them: cast and laid out once.

  Whole along fsdp, so that no token waits for them; the output head apart from
  a tied embedding, whose rows stay float32.
  """
  params = sharding.gather(sharding.cut(_cast(params, dtype)))
  if config.labels:
    return params
  head = params["embed"].T if config.tied else params["head"]
  params |= {"head": head.astype(dtype)}
  return params


def _gathered_block(config, x, layer, *args):
  """A layer of `block`, with its parameters gathered while it runs."""
  return block(config, x, sharding.gather(layer, "layer/"), *args)


def _functions(
  config: TransformerConfig, layer_step: Callable[..., Any], dtype: Any
) -> LM:
  """The model's functions.

  Args:
    config: of the model.
    layer_step: runs a layer; `block`, or with something around it.
    dtype: of computation.
  """

  def prefill(params, prompt_ids, prompt_mask):
    args = (_cast(params, dtype), prompt_ids, prompt_mask)
    return _prefill(config, layer_step, dtype, *args)

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    args = (_cast(params, dtype), prefix, ids, cache, positions, segments)
    return _extend(config, layer_step, dtype, *args)

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
    unembed=lambda params, hidden: _unembed(config, params, hidden, dtype),
    init_cache=init_cache,
  )


def transformer(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  remat: bool = False,
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
  # Where no two layers differ, `local` is a Python value.
  checkpointed = jax.checkpoint(
    _gathered_block,
    static_argnums=(0, 3) if len(set(config.locality)) == 1 else (0,),
    prevent_cse=False,  # under a scan nothing can be merged with it
    policy=None if remat else sharding.all_but_gathered,
  )
  decoder = _functions(config, block, dtype)

  def layer_step(*args):
    gathers = sharding.fsdp_shards() > 1
    return (checkpointed if remat or gathers else block)(*args)

  def prepare(params, decoding):
    if decoding:
      return decoder, _for_decoding(config, params, dtype)
    params = sharding.cut(_cast(params, dtype))
    outer = {name: x for name, x in params.items() if name != "layers"}
    if config.tied:  # twice, so that each gradient is cut by itself
      outer["head"] = outer["embed"].T
    return lm, params | sharding.gather(outer)

  lm = _functions(config, layer_step, dtype)._replace(prepare=prepare)
  return lm
