"""Forward passes over prompts, completions, and the next tokens of decoding.

A pass builds the `TokenContext` of its tokens, embeds them, runs the layers of
all stacks (`layer_stacks`) and applies the final norm:

    prefill   prompts [B, P]         -> keys and values of all layers
    extend    completions [B, G, S], -> hidden states, given prefilled prompts
              or the next S tokens      and, for next tokens, a cache
    forward   prompts, completions   -> hidden states, for training
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.losses.load_balancing import ExpertLoad
from grpojax.core.meshes import constrain, runs_kernels, sample_cuts
from grpojax.core.packing.flat_tokens import unflatten
from grpojax.core.types import (
  ExtendOutput,
  ForwardOutput,
  Params,
  Prefix,
  Tokens,
)
from grpojax.models import block, contexts, decode_attention, layer_stacks, moe
from grpojax.models import cache as cache_lib
from grpojax.models.attention import rms_norm
from grpojax.models.block import Layer, Local, Routing
from grpojax.models.block_attention import RowAttention
from grpojax.models.cache import ByKind, Cache, Slots, attention_of
from grpojax.models.config import TransformerConfig
from grpojax.models.gated_delta import Rows, Stored

UNCAST = ("embed", "router", "shared_gate", "linear_conv")


def cast(params: Params, dtype: Any) -> Params:
  """Casts parameters to `dtype`, except vectors, embeddings and `UNCAST`.

  Gradients of norms, biases and embeddings are sums over tokens, too inexact in
  bfloat16. A rounded router would choose other experts (`moe.route`).
  """

  def cast_leaf(path, x):
    if x.dtype == jnp.int8 or path[0].key == contexts.ROPE:  # only in rollouts
      return x
    name = path[-1].key
    uncast = name.endswith(("norm", "bias")) or name in UNCAST
    return x if uncast else x.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast_leaf, params)


def _flat_block(
  config: TransformerConfig,
  x: Float[Array, "C 1 N D"],
  layer: Layer,
  local: Local,
  context: contexts.FlatContext,
  row_attention: RowAttention | None,
) -> tuple[Float[Array, "C 1 N D"], ExpertLoad | None]:
  """Applies a decoder layer to flat tokens, padded for attention only."""
  prompt_context, row_context = context.parts
  flat = context.flat
  mixer_of = functools.partial(
    block.mixer, config, layer, local, slots=None, row_attention=row_attention
  )

  def mix(inputs):
    # Split q, k and v into prompts [B, 1, P] and rows [n, G, S].
    prompts, rows = zip(
      *(contexts.split_flat(x, flat) for x in inputs), strict=True
    )

    def padded(parts, places, context):
      shape = context.positions.shape
      return type(inputs)(*(unflatten(x, places, shape) for x in parts))

    mix_prompts = mixer_of(context=prompt_context, prompt=None)
    prompt_out, row = mix_prompts(padded(prompts, flat.prompts, prompt_context))
    # Each row of completions gets the keys and values of its prompt.
    prompt = jax.tree.map(flat.of_rows, cache_lib.of_prompt(row))
    mix_rows = mixer_of(context=row_context, prompt=prompt)
    out, _ = mix_rows(padded(rows, flat.rows, row_context))
    return contexts.join_flat(prompt_out, out, flat), None

  table = block.rotary_table(local, context.tables)
  x, _, routed = block.layer_of(config, x, layer, table, context.routing, mix)
  return x, routed.load


def _indices(stack: ByKind | Slots) -> Any:
  """Returns each layer's place among the cache's layers of its kind."""
  if not isinstance(stack, ByKind):
    return jnp.arange(len(stack.values))
  # States are stacked over the periods, for each place in a period.
  periods = jnp.arange(len(stack.linear[0].memory))
  layers = jnp.arange(len(stack.attention.values))
  return ByKind(layers, jnp.repeat(periods, len(stack.linear)))


class _LayerOutput(NamedTuple):
  stored: Any  # keys and values, or a state
  experts: Int[Array, "B G S count"] | None


def _separate(outputs: tuple[Any, ...]) -> tuple[Any, Any]:
  """Returns what the layers of all stacks store, and their experts."""
  is_output = lambda x: isinstance(x, _LayerOutput)
  select = lambda name: jax.tree.map(
    lambda x: getattr(x, name), outputs, is_leaf=is_output
  )
  return select("stored"), select("experts")


def _replay(context: Any, replayed: Any) -> Any:
  """Adds `replayed` experts of a layer, if any, to one context or a pair."""
  if replayed is None:
    return context
  if isinstance(replayed, tuple):
    return tuple(map(_replay, context, replayed))
  return context._replace(routing=context.routing._replace(replayed=replayed))


def _lengths(prompt_mask: Bool[Array, "B P"]) -> Int[Array, "B"]:
  return jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)


def map_rows(function: Callable[..., Array], tree: Any) -> Any:
  """Applies a function to each array of a prefix or a cache."""
  if not isinstance(tree, Prefix):
    return cache_lib.map_rows(function, tree)
  keys_values, prompt_mask = tree.state
  return Prefix(
    function(tree.last_hidden),
    function(tree.length),
    (cache_lib.map_prompts(function, keys_values), function(prompt_mask)),
  )


@dataclasses.dataclass(frozen=True)
class Passes:
  """Forward passes of a model, with the signatures of `LM`'s functions."""

  config: TransformerConfig
  dtype: Any  # of computation
  # Name in `layer_stacks.REMAT`; None for decoding, which has gathered
  # parameters and no backward pass.
  remat: str | None
  row_attention: RowAttention | None  # for rows of more than `WHOLE` tokens
  platform: str | None = None  # for decoding

  def prefill(
    self,
    params: Params,
    prompt_ids: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
    record: bool = False,
  ) -> Prefix:
    """Returns the keys and values of prompts; `record` adds their experts."""
    params = cast(params, self.dtype)
    context = contexts.of_prompts(self.config, prompt_mask, self.row_attention)

    def body(x, local, layer):
      # A prompt is a group of one: the layers see tokens [B, 1, P, D].
      args = x, layer, local, context, None, None
      x, row, routed = self._run(block.block, *args)
      experts = routed.experts if record else None
      return x, _LayerOutput(cache_lib.of_prompt(row), experts)

    x = self._embed(params, prompt_ids[:, None])
    whole = self.whole_matrices(params)
    x, outputs = layer_stacks.scan(self.config, body, x, params, whole=whole)
    keys_values, experts = _separate(outputs)
    return Prefix(
      last_hidden=self._last_hidden(params, x, prompt_mask),
      length=_lengths(prompt_mask),
      state=(keys_values, prompt_mask),
      experts=self._join_experts(experts)[:, 0] if record else None,
    )

  def extend(
    self,
    params: Params,
    prefix: Prefix,
    ids: Int[Array, "B G S"],
    cache: Cache | None = None,
    positions: Int[Array, "B G S"] | None = None,
    segments: Int[Array, "B G S"] | None = None,
    record: bool = False,
  ) -> ExtendOutput:
    """Runs completion tokens after a prefix."""
    if cache is not None and (segments is not None or positions is None):
      raise ValueError(
        "decoding with a cache needs positions, and no segments (for training)"
      )
    params = cast(params, self.dtype)
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    keys_values, prompt_mask = prefix.state
    x = self._embed(params, ids)
    config = self.config
    if cache is not None:
      context = contexts.of_next(config, params, cache, positions, prefix)
      return self._decode(
        params, keys_values, x, context, cache, positions, record
      )
    # Positions in the whole sequence: padding of the prompt does not count.
    absolute = prefix.length[:, None, None] + positions
    rows = absolute, segments, prompt_mask
    context = contexts.of_rows(config, *rows, self.row_attention)
    if segments is not None:
      context = context._replace(rows=Rows(packed=positions))

    def body(x, local, layer, prompt):
      x, *_ = self._run(block.block, x, layer, local, context, prompt, None)
      return x, None

    x, _ = layer_stacks.scan(config, body, x, params, keys_values)
    return ExtendOutput(self._final_norm(params, x), None)

  def _decode(
    self, params, keys_values, x, context, cache, positions, record: bool
  ):
    """Runs the next tokens, and writes them to the cache after all layers."""
    slots = attention_of(cache[0])
    if x.shape[2] == 1 and decode_attention.serves(self.platform, slots):
      rows = decode_attention.Rows(
        positions[..., 0], _lengths(context.prompt_mask)
      )
      return self._decode_in_place(
        params, keys_values, x, context, cache, rows, record
      )

    def body(carry, local, layer, prompt, own):
      x, states = carry
      is_linear = block.is_linear(layer)
      own = Stored(states[0], own, self.platform) if is_linear else own
      x, row, routed = block.block(
        self.config, x, layer, local, context, prompt, own, None
      )
      if is_linear:
        states = (*states[1:], row)  # in the old order after a period
        row = None
      experts = routed.experts if record else None
      return (x, states), _LayerOutput(row, experts)

    whole = self.whole_matrices(params)
    own = cache  # of each layer: its slots, or the place of its state
    states = (None,) * len(cache)
    if self.config.period:
      states = tuple(stack.linear for stack in cache)
      own = tuple(
        _indices(stack)._replace(attention=stack.attention) for stack in cache
      )
    x, outputs = layer_stacks.scan(
      self.config,
      body,
      x,
      params,
      keys_values,
      own,
      whole=whole,
      carried=states,
    )
    states, outputs = zip(*outputs, strict=True)
    tokens, experts = _separate(outputs)
    tokens = tuple(map(attention_of, tokens))
    if self.config.period:
      cache = tuple(
        stack._replace(linear=state)
        for stack, state in zip(cache, states, strict=True)
      )
    cache = cache_lib.write(cache, tokens, positions, x)
    experts = self._join_experts(experts) if record else None
    return ExtendOutput(self._final_norm(params, x), cache, experts)

  def whole_matrices(self, params: Params) -> Sequence[str]:
    """Returns the names of matrices that TPUs read from whole stacks.

    From sliced stacks, XLA:TPU would copy a layer's experts for every token.
    """
    if self.platform != "tpu" or not runs_kernels():
      return ()
    stack = layer_stacks.stacks(params)[0]
    return moe.matrices_of(stack[0] if isinstance(stack, list) else stack)

  def _join_experts(self, experts: tuple[Any, ...]) -> Array:
    """Joins the experts of all layers per token, in the layers' order."""
    in_order = functools.partial(layer_stacks.in_order, self.config)
    return moe.join_layers(self.config, tuple(map(in_order, experts)))

  def _decode_in_place(
    self, params, keys_values, x, context, cache, rows, record: bool
  ):
    """Runs one token per row; each layer writes it to the cache by a kernel."""
    config = self.config

    def body(carry, local, layer, prompt, index):
      x, stack = carry
      if block.is_linear(layer):
        state, *others = stack.linear
        stored = Stored(state, index, self.platform)
        x, state, routed = block.block(
          config, x, layer, local, context, prompt, stored, None
        )
        # In the old order after a period
        stack = stack._replace(linear=(*others, state))
        return (x, stack), routed.experts if record else None
      slots = attention_of(stack)
      attention = functools.partial(
        decode_attention.attend,
        *(config, self.platform, local, context, rows, prompt, slots, index),
      )
      table = block.rotary_table(local, context.tables)
      x, slots, routed = block.layer_of(
        config, x, layer, table, context.routing, attention
      )
      stack = cache_lib.with_attention(stack, slots)
      return (x, stack), routed.experts if record else None

    whole = self.whole_matrices(params)
    scanned = keys_values, tuple(map(_indices, cache))
    x, outputs = layer_stacks.scan(
      config, body, x, params, *scanned, whole=whole, carried=cache
    )
    cache, experts = zip(*outputs, strict=True)
    experts = self._join_experts(experts) if record else None
    return ExtendOutput(self._final_norm(params, x), cache, experts)

  def forward(
    self,
    params: Params,
    tokens: Tokens,
  ) -> ForwardOutput:
    """Returns hidden states of prompts and whole completions, for training.

    The load counts the routers' own choices, even if experts are replayed.
    """
    config = self.config
    params = cast(params, self.dtype)
    prompt_ids = tokens.prompt_ids
    prompt_mask = tokens.prompt_mask
    ids = tokens.ids
    flat = tokens.flat
    positions = tokens.positions
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    row_prompts = prompt_mask if flat is None else flat.of_rows(prompt_mask)
    absolute = _lengths(row_prompts)[:, None, None] + positions
    attention = self.row_attention
    prompts = contexts.of_prompts(config, prompt_mask, attention)
    rows = contexts.of_rows(
      config, absolute, tokens.segments, row_prompts, attention
    )
    if tokens.segments is not None:
      rows = rows._replace(rows=Rows(packed=positions))
    # Prompts are groups of one: [B, P] -> [B, 1, P].
    if tokens.load_weights is not None:
      weights = tokens.prompt_load_weights[:, None]
      prompts = prompts._replace(routing=Routing(weights))
      rows = rows._replace(routing=Routing(tokens.load_weights))
    replayed = None
    if tokens.experts is not None:
      replayed = tokens.prompt_experts[:, None], tokens.experts

    # Embed the tokens, as two arrays or joined to flat tokens.
    if flat is None:
      x = self._embed_both(params, prompt_ids, ids)
      layer_of = block.joint_block
      context = (prompts, rows)
    else:
      x = self._embed(
        params, contexts.join_flat(prompt_ids[:, None], ids, flat)
      )
      layer_of = _flat_block
      context = contexts.of_flat(config, prompts, rows, flat)
      if replayed is not None:
        replayed = contexts.join_flat(*replayed, flat)

    def body(x, local, layer, replayed=None):
      return self._run(layer_of, x, layer, local, _replay(context, replayed))

    scanned = []
    # Each stack scans the replayed experts of its own layers.
    if replayed is not None:
      sizes = map(layer_stacks.layer_count, layer_stacks.stacks(params))
      replayed = moe.split_layers(config, replayed)
      scanned = [layer_stacks.split(replayed, list(sizes))]
    x, loads = layer_stacks.scan(
      config, body, x, params, *scanned, remat=self.remat
    )
    # Sum the loads over the layers of all stacks; without weights all are None.
    loads = [layer_stacks.in_order(config, x) for x in loads]
    load = jax.tree.map(lambda *x: jnp.sum(jnp.concatenate(x), axis=0), *loads)
    if flat is None:
      prompts, x = x
    else:
      prompts, x = contexts.split_flat(x, flat)
      prompts = unflatten(prompts, flat.prompts, prompt_ids[:, None].shape)
    last = self._last_hidden(params, prompts, prompt_mask)
    return ForwardOutput(last, self._final_norm(params, x), load)

  def _run(self, function: Callable[..., Any], *args: Any) -> Any:
    function = functools.partial(function, row_attention=self.row_attention)
    return layer_stacks.run_layer(self.remat, function, self.config, *args)

  def _embed(self, params: Params, ids: Array) -> Float[Array, "B G S D"]:
    x = params["embed"][ids].astype(jnp.float32)
    if self.config.embedding_scale != 1:  # rounded as in transformers
      x = x * jnp.asarray(self.config.embedding_scale, self.dtype)
    return constrain(x, "batch", "group")

  def _embed_both(
    self, params: Params, prompt_ids: Int[Array, "B P"], ids: Array
  ) -> tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]]:
    """Embeds prompts and completions [B, G, S] with a single lookup.

    For two lookups, XLA:TPU's gradient held five arrays of the table's size.
    """
    b, g, s = ids.shape
    if sample_cuts(b, g)[1] > 1:  # if joined, completions would change devices
      return self._embed(params, prompt_ids[:, None]), self._embed(params, ids)
    both = jnp.concatenate([prompt_ids, ids.reshape(b, g * s)], axis=1)
    x = self._embed(params, both[:, None])
    prompts, x = jnp.split(x, [prompt_ids.shape[1]], axis=2)
    x = x.reshape(b, g, s, -1)
    return constrain(prompts, "batch", "group"), constrain(x, "batch", "group")

  def _final_norm(self, params: Params, x: Array) -> Array:
    """Applies the final norm; returns the output head's inputs, in `dtype`."""
    config = self.config
    scale = params["final_norm"]
    y = rms_norm(x, scale, config.norm_eps, offset=config.norm_offset)
    return y.astype(self.dtype)

  def _last_hidden(self, params: Params, x: Array, prompt_mask: Array) -> Array:
    # The last real token predicts the completion's first token.
    index = (_lengths(prompt_mask) - 1)[:, None, None]
    last = jnp.take_along_axis(x[:, 0], index, axis=1)
    return self._final_norm(params, last[:, 0])
