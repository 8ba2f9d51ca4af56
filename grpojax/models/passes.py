"""Tokens on their way through the layers: prompts, completions, the next token.

A pass makes the `TokenContext` of its tokens, embeds them, runs the layers of
all stacks (`layer_stacks`) and applies the final norm:

    prefill   prompts [B, P]          -> keys and values of all layers
    extend    completions [B, G, S]   -> hidden states, given those; with a
                                         cache, S next tokens
    forward   both, layer by layer: training, nothing is kept
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from grpojax.core.losses.load_balancing import ExpertLoad
from grpojax.core.mesh import constrain, sample_cuts
from grpojax.core.packing import flat_tokens
from grpojax.core.packing.flat_tokens import FlatTokens, flatten, unflatten
from grpojax.core.types import Params, Prefix
from grpojax.models import block as block_lib
from grpojax.models import cache as cache_lib
from grpojax.models import layer_stacks, moe
from grpojax.models.attention import rms_norm
from grpojax.models.block import (
  Heads,
  Layer,
  Local,
  Routing,
  TokenContext,
  block,
  block_of_both,
)
from grpojax.models.block_attention import WHOLE, RowAttention
from grpojax.models.cache import Cache
from grpojax.models.config import TransformerConfig
from grpojax.models.rope import RotaryTable, rope_tables

ROPE = "rope"
"""Name of rotary tables of all positions, where they are with the parameters
(`LM.prepare`)."""


def _stays_float32(name: str) -> bool:
  """Returns True for a parameter that is used as it is, in any dtype.

  The gradients of a scale, a bias and an embedding are sums over all tokens,
  in the dtype of what is used: in bfloat16 these would be wrong. A rounded
  router would send tokens to other experts (`moe.route`).
  """
  return name.endswith(("norm", "bias")) or name in ("embed", "router")


def cast(params: Params, dtype: Any) -> Params:
  """Returns parameters as the matrix products read them."""

  def one(path, x):
    in_bits = x.dtype == jnp.int8  # of a rollout (`quantization`)
    if in_bits or path[0].key == ROPE or _stays_float32(path[-1].key):
      return x
    return x.astype(dtype)

  return jax.tree_util.tree_map_with_path(one, params)


def rope_of_kinds(
  config: TransformerConfig, positions: Int[Array, "*tokens"]
) -> tuple[RotaryTable, ...]:
  """Returns the rotary tables of each of `TransformerConfig.ropes`."""
  return tuple(
    rope_tables(positions, config.head_dim, rope) for rope in config.ropes
  )


def _row_mask(
  size: int, segments: Int[Array, "B G S"] | None
) -> Bool[Array, "..."]:
  """Returns a mask: causal, and within a segment where there are several."""
  mask = jnp.tril(jnp.ones((size, size), bool))
  if segments is not None:
    same = segments[..., :, None] == segments[..., None, :]
    mask = (mask[None, None] & same)[:, :, None, None]  # of all heads
  return mask


def _row_context(
  config: TransformerConfig,
  positions: Int[Array, "B G S"],
  segments: Int[Array, "B G S"] | None,
  prompt_mask: Bool[Array, "B P"] | None,
  row_attention: RowAttention | None,
) -> TokenContext:
  """Returns the context of whole rows; long ones have an attention apart."""
  size = positions.shape[-1]
  at_once = size <= WHOLE or row_attention is None
  mask = _row_mask(size, segments) if at_once else None
  tables = rope_of_kinds(config, positions)
  return TokenContext(tables, mask, positions, prompt_mask, segments=segments)


def _prompt_context(
  config: TransformerConfig,
  prompt_mask: Bool[Array, "B P"],
  row_attention: RowAttention | None,
) -> TokenContext:
  """Returns the context of the prompts, as rows of a group of one."""
  b, p = prompt_mask.shape
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  # Causal alone: padding stands behind all real tokens, which do not see it,
  # and what is computed of it is never read.
  return _row_context(config, positions, None, None, row_attention)


def _next_context(
  config: TransformerConfig,
  params: Params,
  cache: Cache,
  lengths: Int[Array, "B G"] | None,
  positions: Int[Array, "B G S"],
  prompt_mask: Bool[Array, "B P"],
) -> TokenContext:
  """Returns the context of the next tokens of rows in a cache.

  `lengths` counts the tokens of each row in it; None means all that were
  written.
  """
  mask = _row_mask(positions.shape[-1], None)
  slot_mask = cache_lib.filled(cache)
  if lengths is not None:
    ages = jnp.expand_dims(cache_lib.ages(cache), (0, 1, 2, 3, 4))
    slot_mask = ages < lengths[..., None, None, None, None]
  if ROPE in params:  # padding of observations may be at any position
    look_up = lambda x: jnp.take(x, positions, axis=0, mode="clip")
    tables = jax.tree.map(look_up, params[ROPE])
  else:
    tables = rope_of_kinds(config, positions)
  return TokenContext(
    tables,
    mask,
    positions,
    prompt_mask,
    slot_mask=slot_mask,
    slot_positions=cache_lib.slot_positions(cache, positions),
  )


class _FlatContext(NamedTuple):
  """Positions of flat tokens, prompts' and then rows', without padding."""

  tables: tuple[RotaryTable, ...]  # rotary tables of the flat tokens
  routing: Routing  # of the flat tokens
  # Contexts of the prompts and of the rows, for attention.
  parts: tuple[TokenContext, TokenContext]
  flat: FlatTokens  # places of their tokens


def _join_flat(
  prompts: Shaped[Array, "B 1 P *more"],
  rows: Shaped[Array, "n G S *more"],
  flat: FlatTokens,
) -> Shaped[Array, "C 1 N *more"]:
  """Returns the flat tokens of prompts and of rows."""
  parts = flatten(prompts, flat.prompts), flatten(rows, flat.rows)
  return jnp.concatenate(parts, axis=2)


def _split_flat(
  x: Shaped[Array, "C 1 N *more"], flat: FlatTokens
) -> tuple[Shaped[Array, "C 1 _ *more"], Shaped[Array, "C 1 _ *more"]]:
  """Returns the flat tokens of prompts, and those of rows."""
  return tuple(jnp.split(x, [flat.prompts.place_of_token.shape[1]], axis=2))


def _flat_context(config, prompts, rows, flat: FlatTokens) -> _FlatContext:
  """Returns the context of flat tokens, of those of prompts and rows."""
  positions = _join_flat(prompts.positions, rows.positions, flat)
  routing = jax.tree.map(
    lambda prompts, rows: _join_flat(prompts, rows, flat),
    prompts.routing,
    rows.routing,
  )
  tables = rope_of_kinds(config, positions)
  return _FlatContext(tables, routing, (prompts, rows), flat)


def _flat_block(
  config: TransformerConfig,
  x: Float[Array, "C 1 N D"],
  layer: Layer,
  local: Local,
  context: _FlatContext,
  row_attention: RowAttention | None,
) -> tuple[Float[Array, "C 1 N D"], ExpertLoad | None]:
  """Applies `block_of_both` to flat tokens; attention alone has padded ones."""
  of_prompts, of_rows = context.parts
  flat = context.flat

  def attend(context, prompt, heads):
    return block_lib.attend(
      config, local, context, prompt, None, row_attention, heads
    )

  def padded(heads, places, part):
    return Heads(*(unflatten(x, places, part.positions.shape) for x in heads))

  def attention(heads):
    prompts, rows = zip(*(_split_flat(x, flat) for x in heads), strict=True)
    prompts = padded(prompts, flat.prompts, of_prompts)
    rows = padded(rows, flat.rows, of_rows)
    prompt_out, row = attend(of_prompts, None, prompts)
    prompt = jax.tree.map(flat.of_rows, cache_lib.of_prompt(row))
    out, _ = attend(of_rows, prompt, rows)
    return _join_flat(prompt_out, out, flat), None

  table = block_lib.rotary_table(local, context.tables)
  x, _, routed = block_lib.layer_of(
    config, x, layer, table, context.routing, attention
  )
  return x, routed.load


def _replay(context: Any, replayed: Any) -> Any:
  """Has the routers of one layer replay experts, in contexts of tokens.

  `replayed` are those of the layer, in a pair where `context` is one, or None.
  """
  if replayed is None:
    return context
  if isinstance(replayed, tuple):
    return tuple(map(_replay, context, replayed))
  return context._replace(routing=context.routing._replace(replayed=replayed))


def _lengths(prompt_mask: Bool[Array, "B P"]) -> Int[Array, "B"]:
  return jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)


def map_prefix_rows(function: Callable[..., Array], prefix: Prefix) -> Prefix:
  """Maps a function of arrays [B, ...] over all arrays of a prefix."""
  keys_values, prompt_mask = prefix.state
  return Prefix(
    function(prefix.last_hidden),
    function(prefix.length),
    (cache_lib.map_prompts(function, keys_values), function(prompt_mask)),
  )


@dataclasses.dataclass(frozen=True)
class Passes:
  """The passes of one model; their arguments are those of `LM`'s functions.

  Attributes:
    config: shape of the model.
    dtype: type of computation.
    remat: name in `layer_stacks.REMAT`, or None for decoding, which has no
      backward pass and whose parameters are gathered already.
    row_attention: attention of rows of more than `WHOLE` tokens, or None: they
      attend at once, as shorter ones do.
    platform: where it decodes, or None (`cache.write`).
  """

  config: TransformerConfig
  dtype: Any
  remat: str | None
  row_attention: RowAttention | None
  platform: str | None = None

  def prefill(
    self,
    params: Params,
    prompt_ids: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
  ) -> Prefix:
    """Runs the prompts as rows of a group of one, and keeps keys and values."""
    return self._prefill(params, prompt_ids, prompt_mask, False)[0]

  def prefill_with_experts(
    self,
    params: Params,
    prompt_ids: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
  ) -> tuple[Prefix, Integer[Array, "B P X"]]:
    """Runs `prefill`, and records the tokens' experts."""
    prefix, experts = self._prefill(params, prompt_ids, prompt_mask, True)
    return prefix, moe.recorded(self.config, experts)[:, 0]

  def _prefill(self, params, prompt_ids, prompt_mask, record: bool):
    params = cast(params, self.dtype)
    context = _prompt_context(self.config, prompt_mask, self.row_attention)

    def body(x, local, layer):
      x, row, routed = self._run(block, x, layer, local, context, None, None)
      return x, (cache_lib.of_prompt(row), routed.experts if record else None)

    x = self._embed(params, prompt_ids[:, None])
    x, outputs = layer_stacks.scan(self.config, body, x, params)
    keys_values, experts = zip(*outputs, strict=True)
    prefix = Prefix(
      last_hidden=self._last_hidden(params, x, prompt_mask),
      length=_lengths(prompt_mask),
      state=(keys_values, prompt_mask),
    )
    return prefix, experts

  def extend(
    self,
    params: Params,
    prefix: Prefix,
    ids: Int[Array, "B G S"],
    cache: Cache | None = None,
    positions: Int[Array, "B G S"] | None = None,
    segments: Int[Array, "B G S"] | None = None,
  ) -> tuple[Float[Array, "B G S D"], Cache | None]:
    """Runs completion tokens on from a prefix."""
    return self._extend(params, prefix, ids, cache, positions, segments)[:2]

  def extend_with_experts(
    self,
    params: Params,
    prefix: Prefix,
    ids: Int[Array, "B G S"],
    cache: Cache,
    positions: Int[Array, "B G S"] | None = None,
  ) -> tuple[Float[Array, "B G S D"], Cache, Integer[Array, "B G S X"]]:
    """Runs `extend` with a cache, and records the tokens' experts."""
    hidden, cache, experts = self._extend(
      params, prefix, ids, cache, positions, None, True
    )
    return hidden, cache, moe.recorded(self.config, experts)

  def _extend(
    self, params, prefix, ids, cache, positions, segments, record=False
  ):
    if cache is not None and segments is not None:
      raise ValueError("segments are for training rows; decode without them")
    config, params = self.config, cast(params, self.dtype)
    lengths = None if positions is None else positions[..., 0]
    if positions is None:
      start = 0 if cache is None else cache.index
      positions = jnp.broadcast_to(start + jnp.arange(ids.shape[-1]), ids.shape)
    # From here on in the whole sequence. A completion goes on where its
    # prompt's real tokens end: the padding between the two has no positions.
    positions = prefix.length[:, None, None] + positions
    keys_values, prompt_mask = prefix.state
    x, experts = self._embed(params, ids), None
    if cache is None:
      context = _row_context(
        config, positions, segments, prompt_mask, self.row_attention
      )

      def body(x, local, layer, prompt):
        x, *_ = self._run(block, x, layer, local, context, prompt, None)
        return x, None

      x, _ = layer_stacks.scan(config, body, x, params, keys_values)
    else:
      context = _next_context(
        config, params, cache, lengths, positions, prompt_mask
      )

      def next_body(x, local, layer, prompt, slots):
        x, row, routed = block(config, x, layer, local, context, prompt, slots)
        return x, (row, routed.experts if record else None)

      # XLA:TPU copies each layer's experts out of a stack, for every token.
      on_tpu = self.platform == "tpu"
      whole = moe.matrices_of(layer_stacks.stacks(params)[0]) if on_tpu else ()
      # The layers only read the cache; all tokens are written at the end.
      slots = tuple(zip(*cache.blocks, strict=True))  # of each stack its blocks
      x, outputs = layer_stacks.scan(
        config,
        next_body,
        x,
        params,
        keys_values,
        slots,
        whole=whole,
      )
      tokens, experts = zip(*outputs, strict=True)
      cache = cache_lib.write(cache, tokens, x, self.platform)
    return self._final_norm(params, x), cache, experts

  def forward(
    self, *args: Any, **options: Any
  ) -> tuple[Float[Array, "B D"], Float[Array, "*tokens D"]]:
    """Runs `forward_with_load`, without the routers' load."""
    return self.forward_with_load(*args, **options)[:2]

  def forward_with_load(
    self,
    params: Params,
    prompt_ids: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
    ids: Int[Array, "n G S"],
    positions: Int[Array, "n G S"] | None = None,
    segments: Int[Array, "n G S"] | None = None,
    flat: FlatTokens | None = None,
    *,
    load_weights: tuple[Float[Array, "B P"], Float[Array, "n G S"]]
    | None = None,
    replayed: tuple[Integer[Array, "B P X"], Integer[Array, "n G S X"]]
    | None = None,
  ) -> tuple[Float[Array, "B D"], Float[Array, "*tokens D"], ExpertLoad | None]:
    """Runs prompts and whole completions layer by layer.

    The routers' load is None unless `load_weights` asks for it. Of `replayed`
    tokens it is what the routers would choose.
    """
    config, params = self.config, cast(params, self.dtype)
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    of_rows = prompt_mask if flat is None else flat.of_rows(prompt_mask)
    positions = _lengths(of_rows)[:, None, None] + positions
    attention = self.row_attention
    prompts = _prompt_context(config, prompt_mask, attention)
    rows = _row_context(config, positions, segments, of_rows, attention)
    if load_weights is not None:
      prompts = prompts._replace(routing=Routing(load_weights[0][:, None]))
      rows = rows._replace(routing=Routing(load_weights[1]))
    if replayed is not None:
      replayed = replayed[0][:, None], replayed[1]

    if flat is None:
      x = self._embed_both(params, prompt_ids, ids)
      layer_of, context = block_of_both, (prompts, rows)
    else:
      x = self._embed(params, _join_flat(prompt_ids[:, None], ids, flat))
      layer_of = _flat_block
      context = _flat_context(config, prompts, rows, flat)
      if replayed is not None:
        replayed = _join_flat(replayed[0], replayed[1], flat)

    def body(x, local, layer, replayed=None):
      return self._run(layer_of, x, layer, local, _replay(context, replayed))

    scanned = []
    if replayed is not None:
      replayed = moe.by_layer(config, replayed)
      stacks = layer_stacks.stacks(params)
      sizes = [layer_stacks.layer_count(stack) for stack in stacks]
      scanned = [layer_stacks.split(replayed, sizes)]
    x, loads = layer_stacks.scan(
      config, body, x, params, *scanned, remat=self.remat
    )
    load = jax.tree.map(lambda *x: jnp.sum(jnp.concatenate(x), axis=0), *loads)
    if flat is None:
      prompts, x = x
    else:
      prompts, x = _split_flat(x, flat)
      shape = prompt_ids[:, None].shape
      prompts = flat_tokens.unflatten(prompts, flat.prompts, shape)
    last = self._last_hidden(params, prompts, prompt_mask)
    return last, self._final_norm(params, x), load

  def _run(self, function: Callable[..., Any], *args: Any) -> Any:
    """Runs one layer."""
    function = functools.partial(function, row_attention=self.row_attention)
    return layer_stacks.run_layer(self.remat, function, self.config, *args)

  def _embed(self, params: Params, ids: Array) -> Float[Array, "B G S D"]:
    """Returns hidden states before the first layer, float32."""
    x = params["embed"][ids].astype(jnp.float32)
    if self.config.scaled_embedding:  # transformers rounds the factor
      x = x * jnp.asarray(self.config.width**0.5, self.dtype)
    return constrain(x, "batch", "group")

  def _embed_both(
    self, params: Params, prompt_ids: Int[Array, "B P"], ids: Array
  ) -> tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]]:
    """Embeds prompts and completions [B, G, S] by one lookup.

    The gradient of a lookup is as large as the table, in float32: with two of
    them XLA held five such arrays at once on a TPU, with one it holds one.
    """
    b, g, s = ids.shape
    if sample_cuts(b, g)[1] > 1:  # or completions would leave their devices
      return self._embed(params, prompt_ids[:, None]), self._embed(params, ids)
    both = jnp.concatenate([prompt_ids, ids.reshape(b, g * s)], axis=1)
    x = self._embed(params, both[:, None])
    prompts, x = jnp.split(x, [prompt_ids.shape[1]], axis=2)
    x = x.reshape(b, g, s, -1)
    return constrain(prompts, "batch", "group"), constrain(x, "batch", "group")

  def _final_norm(self, params: Params, x: Array) -> Array:
    """Returns hidden states as the output head reads them, in `dtype`."""
    scale, config = params["final_norm"], self.config
    y = rms_norm(x, scale, config.norm_eps, offset=config.norm_offset)
    return y.astype(self.dtype)

  def _last_hidden(self, params: Params, x: Array, prompt_mask: Array) -> Array:
    """Returns the final hidden state [B, D] at each prompt's last token."""
    index = (_lengths(prompt_mask) - 1)[:, None, None]
    last = jnp.take_along_axis(x[:, 0], index, axis=1)
    return self._final_norm(params, last[:, 0])
