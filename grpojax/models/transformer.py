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
from jaxtyping import Array, Float

from grpojax.core.types import LM, Params
from grpojax.models import cache as cache_lib
from grpojax.models import (
  layer_stacks,
  passes,
  row_parts,
  sharding,
  token_contexts,
)
from grpojax.models import remat as remat_lib
from grpojax.models.attention import soft_cap
from grpojax.models.config import TransformerConfig as TransformerConfig
from grpojax.models.config import check, init
from grpojax.models.config import parameter_shapes as parameter_shapes
from grpojax.models.layer_stacks import last_layers as last_layers
from grpojax.models.products import matmul


def _in_float32(name: str) -> bool:
  """Whether a parameter is used as it is, whatever the dtype of computation.

  The gradients of a scale, a bias and an embedding are sums over all tokens,
  of rows and not of products as a matrix's, and are summed in the dtype of
  what is used: in bfloat16 thousands of tokens add up to a wrong sum. A router
  chooses among the experts by the order of its logits: rounded, it would send
  tokens to other experts (see `moe.route`).
  """
  return name.endswith(("norm", "bias")) or name in ("embed", "router")


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
  logits = _product(hidden, head.astype(dtype))
  return logits if config.labels else soft_cap(logits, config.logits_cap)


def _product(
  hidden: Float[Array, "*tokens D"], head: Array
) -> Float[Array, "*tokens V"]:
  """Logits of [D, V], or of a copy of it for each device's rows."""
  if head.ndim == 2:
    return matmul(hidden, head, jnp.float32)
  parts = row_parts.row_parts(*hidden.shape[:2])
  if parts is None:  # rows that devices share read the same copy
    return matmul(hidden, head[0], jnp.float32)
  multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
  return parts.join(jax.vmap(multiply)(parts.split(hidden), head))


def _cast(params: Params, dtype: Any) -> Params:
  """Parameters as the matrix products read them."""

  def cast(path, x):
    of_rope = path[0].key == token_contexts.ROPE  # tables, not parameters
    return x if of_rope or _in_float32(path[-1].key) else x.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def _decoding_stacks(config: TransformerConfig) -> tuple[int, ...]:
  """Layers of each stack while decoding.

  A few layers are taken out of their stack before the loop over tokens, where
  XLA might copy each of them for every token (it does on CPUs). With many
  layers, the program would grow too large.
  """
  few = config.layers <= remat_lib.SHALLOW
  return (1,) * config.layers if few else (config.layers,)


def _for_decoding(
  config: TransformerConfig, params: Params, dtype: Any, longest: int
) -> Params:
  """Parameters as the token loop reads them: cast and laid out once.

  Whole along fsdp, so that no token waits for them; the output head apart from
  a tied embedding, whose rows stay float32. The rotary tables are with them:
  in the loop, XLA would compute them again in all that reads them.
  """
  params = sharding.gather(sharding.cut(_cast(params, dtype)))
  positions = jnp.arange(longest)
  params |= {
    token_contexts.ROPE: token_contexts.rope_of_kinds(config, positions)
  }
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
    return passes.prefill(config, layer_step, dtype, *args)

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    args = (_cast(params, dtype), prefix, ids, cache, positions, segments)
    return passes.extend(config, layer_step, dtype, *args)

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
    map_prefix_rows=passes.map_prefix_rows,
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

  def prepare(params, longest):
    if longest is not None:
      return decoder, _for_decoding(config, params, dtype, longest)
    params = sharding.cut(_cast(params, dtype))
    outer = {name: x for name, x in params.items() if name != "layers"}
    params |= sharding.gather(outer)
    if config.tied:  # apart, so that each gradient is cut by itself
      head = {"embed": outer["embed"].astype(dtype)}
      params["head"] = sharding.gather(head)["embed"].T
    if "head" in params:
      params["head"] = row_parts.copies(params["head"])
    return lm, params

  def forward_with_load(params, *args, **where):
    return passes.forward(
      config,
      layer_step,
      dtype,
      _cast(params, dtype),
      *args,
      **where,
      unroll=remat_lib.unrolled(config, remat),
    )

  def forward(*args, **where):
    return forward_with_load(*args, **where)[:2]

  layer_step = remat_lib.layer_step(remat)
  lm = _functions(config, layer_step, dtype)
  lm = lm._replace(prepare=prepare, forward=forward)
  if config.experts:
    lm = lm._replace(forward_with_load=forward_with_load)
  return lm
