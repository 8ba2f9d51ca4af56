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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.mesh import constrain
from grpojax.core.types import LM, Params, Prefix
from grpojax.models import cache as cache_lib
from grpojax.models import layer_stacks, sharding
from grpojax.models import remat as remat_lib
from grpojax.models.attention import rms_norm, soft_cap
from grpojax.models.block import TokenContext, block, block_of_both
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


def _rows_context(
  config: TransformerConfig,
  positions: Int[Array, "B G S"],
  segments: Int[Array, "B G S"] | None,
  prompt_mask: Bool[Array, "B P"] | None,
) -> TokenContext:
  """Of whole rows; longer ones attend in blocks, and need no whole mask."""
  size = positions.shape[-1]
  mask = _row_mask(size, segments) if size <= BLOCK else None
  context = _token_context(config, mask, positions, prompt_mask)
  return context._replace(segments=segments)


def _prompt_context(
  config: TransformerConfig, prompt_mask: Bool[Array, "B P"]
) -> TokenContext:
  """Of the prompts, as rows of a group of one."""
  b, p = prompt_mask.shape
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  # Causal alone: padding stands behind all real tokens, which do not see it,
  # and what is computed of it is never read.
  return _rows_context(config, positions, None, None)


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


def _prefill(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
) -> Prefix:
  """Runs the prompts as rows of a group of one, and keeps keys and values."""
  context = _prompt_context(config, prompt_mask)

  def body(x, local, layer):
    x, row = layer_step(block, config, x, layer, local, context, None, None)
    return x, cache_lib.of_prompt(row)

  x = _embed(config, params, prompt_ids[:, None], dtype)
  x, keys_values = layer_stacks.scan(config, body, x, params)
  return Prefix(
    last_hidden=_last_hidden(config, params, x, prompt_mask, dtype),
    length=_lengths(prompt_mask),
    state=(keys_values, prompt_mask),
  )


def _map_prefix_rows(function: Callable[..., Array], prefix: Prefix) -> Prefix:
  """Maps a function of arrays [B, ...] over prompts, see `LM`."""
  keys_values, prompt_mask = prefix.state
  return Prefix(
    function(prefix.last_hidden),
    function(prefix.length),
    (cache_lib.map_prompts(function, keys_values), function(prompt_mask)),
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
  context = _rows_context(config, positions, segments, prompt_mask)

  def body(x, local, layer, prompt):
    x, _ = layer_step(block, config, x, layer, local, context, prompt, None)
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
  size = x.shape[2]
  slot_mask = cache_lib.filled(cache)
  if lengths is not None:
    slot_mask = cache_lib.ages(cache) < lengths[..., None, None, None, None]
  context = _token_context(
    config, _row_mask(size, None), positions, prompt_mask
  )._replace(
    slot_mask=slot_mask,
    slot_positions=cache_lib.slot_positions(cache, positions),
  )

  def body(x, local, layer, prompt, slots):
    return block(config, x, layer, local, context, prompt, slots)

  slots = tuple(zip(*cache.blocks, strict=True))  # of each stack its blocks
  x, tokens = layer_stacks.scan(config, body, x, params, keys_values, slots)
  return x, cache_lib.write(cache, tokens, last=x)


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


def _forward(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G S"],
  positions: Int[Array, "B G S"] | None = None,
  segments: Int[Array, "B G S"] | None = None,
  *,
  unroll: bool,
) -> tuple[Float[Array, "B D"], Float[Array, "B G S D"]]:
  """Prompts and whole completions layer by layer, see `LM.forward`."""
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
  positions = _lengths(prompt_mask)[:, None, None] + positions
  contexts = (
    _prompt_context(config, prompt_mask),
    _rows_context(config, positions, segments, prompt_mask),
  )

  def body(x, local, layer):
    return layer_step(block_of_both, config, x, layer, local, contexts), None

  x = tuple(
    _embed(config, params, tokens, dtype)
    for tokens in (prompt_ids[:, None], ids)
  )
  (prompts, x), _ = layer_stacks.scan(config, body, x, params, unroll=unroll)
  last = _last_hidden(config, params, prompts, prompt_mask, dtype)
  return last, _final_norm(config, params, x, dtype)


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


_FEW_LAYERS = 8


def _decoding_stacks(config: TransformerConfig) -> tuple[int, ...]:
  """Layers of each stack while decoding.

  A few layers are taken out of their stack before the loop over tokens, where
  XLA might copy each of them for every token (it does on CPUs). With many
  layers, the program would grow too large.
  """
  few = config.layers <= _FEW_LAYERS
  return (1,) * config.layers if few else (config.layers,)


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
  sizes = _decoding_stacks(config)
  return params | {"layers": layer_stacks.split(params["layers"], sizes)}


def _plain(function, *args):
  return function(*args)


def _functions(
  config: TransformerConfig,
  layer_step: Callable[..., Any],
  dtype: Any,
  stacks: Sequence[int] | None = None,
) -> LM:
  """The model's functions.

  Args:
    config: of the model.
    layer_step: `(function, *args)` runs a layer, `function(*args)`, or that
      with something around it.
    dtype: of computation.
    stacks: layers of each stack of the parameters; None means all in one.
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
      layers=stacks or (config.layers,),
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
    grow_cache=cache_lib.grow,
    map_cache_rows=cache_lib.map_rows,
    map_prefix_rows=_map_prefix_rows,
  )


def transformer(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  remat: str = "none",
) -> LM:
  """The decoder as an `LM`.

  Args:
    config: shape of the model.
    dtype: of matrix products and cache; hidden states between the layers,
      norms, rotations, softmax and logits are float32.
      Parameters may be float32 beside it (an optimizer needs that: a small
      update of a bfloat16 weight rounds to nothing) and are cast where used.
    remat: what the backward pass computes again instead of storing it, a name
      in `remat.REMAT`: "full" (of each layer all but its input: least memory,
      about a third more work), "selective" or "none".

  Raises:
    ValueError: a configuration whose parts do not fit, see `config.check`; no
      such name.
  """
  check(config)
  stacks = _decoding_stacks(config)
  decoder = _functions(config, _plain, dtype, stacks)

  def prepare(params, decoding):
    if decoding:
      return decoder, _for_decoding(config, params, dtype)
    params = sharding.cut(_cast(params, dtype))
    outer = {name: x for name, x in params.items() if name != "layers"}
    if config.tied:  # twice, so that each gradient is cut by itself
      outer["head"] = outer["embed"].T
    return lm, params | sharding.gather(outer)

  def forward(params, *args, **where):
    return _forward(
      config,
      layer_step,
      dtype,
      _cast(params, dtype),
      *args,
      **where,
      unroll=remat_lib.unrolled(config, remat),
    )

  layer_step = remat_lib.layer_step(remat)
  lm = _functions(config, layer_step, dtype)
  lm = lm._replace(prepare=prepare, forward=forward)
  return lm
