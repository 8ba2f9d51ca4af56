"""Builds an `LM` from any causal language model: correct, but slower.

`from_linen(module)` and `from_nnx(factory)` take a model that maps ids [N, S]
to logits [N, S, V]; `from_apply(apply, init)` takes any such function.

Each sample is a row without gaps: the prompt's real tokens, the completion, and
padding (mask False), which a causal model does not read. No work is shared:
training repeats the prompt for each completion of its group, and decoding runs
the whole row again for every token.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from grpojax.core.random_keys import random_key, seed_key
from grpojax.core.types import LM, Cache, Params, Prefix


def from_apply(
  apply: Callable[..., Array],
  init: Callable[..., Params],
  unembed: Callable[..., Array] | None = None,
) -> LM:
  """Builds an LM from a function that runs a causal model over whole rows.

  Args:
    apply: `(params, ids [N, S], positions [N, S], mask [N, S]) -> logits
      [N, S, V]`. It may ignore positions and mask (True on the real tokens at
      the beginning of each row).
    init: `(key) -> params`, any pytree of arrays.
    unembed: `(params, hidden [..., D]) -> logits [..., V]`, if `apply` returns
      hidden states [N, S, D]; it saves the memory of logits [N, S, V].
  """

  def prefill(
    params: Params,
    prompt_ids: Int[Array, "B P"],
    prompt_mask: Bool[Array, "B P"],
  ) -> Prefix:
    length = prompt_mask.sum(axis=1, dtype=jnp.int32)
    slots = jnp.arange(prompt_ids.shape[1])
    positions = jnp.broadcast_to(slots, prompt_ids.shape)
    hidden = apply(params, prompt_ids, positions, prompt_mask)
    last_hidden = _take(hidden, jnp.maximum(length - 1, 0)[:, None])[:, 0]
    return Prefix(last_hidden, length, state=prompt_ids)

  def extend(
    params: Params,
    prefix: Prefix,
    ids: Int[Array, "B G S"],
    cache: Cache = None,
    positions: Int[Array, "B G S"] | None = None,
    segments: Int[Array, "B G S"] | None = None,
  ) -> tuple[Float[Array, "B G S D"], Cache]:
    if segments is not None:
      raise ValueError(
        "a model from grpojax.models.adapters cannot read packed completions: "
        "leave segments=None, or use a model of grpojax.models"
      )
    places = jnp.broadcast_to(jnp.arange(ids.shape[2]), ids.shape)
    if positions is None:
      positions = places
    if cache is not None:  # the ids of completions so far
      put = lambda row, at, new: row.at[at].set(new, mode="drop")
      places = positions
      at = jnp.where(places < 0, cache.shape[2], places)
      ids = cache = jax.vmap(jax.vmap(put))(cache, at, ids)
      positions = jnp.broadcast_to(jnp.arange(ids.shape[2]), ids.shape)
    filled = jnp.max(places, axis=-1, keepdims=True) + 1
    rows, row_positions, mask = _rows(prefix, ids, positions, filled)
    hidden = apply(params, rows, row_positions, mask)
    slots = prefix.length[:, None, None] + jnp.maximum(places, 0)
    hidden = _take(hidden, slots.reshape(-1, slots.shape[2]))
    return hidden.reshape(*places.shape[:2], *hidden.shape[1:]), cache

  def init_cache(batch: int, group_size: int, length: int) -> Cache:
    return jnp.zeros((batch, group_size, length), jnp.int32)

  return LM(
    init=init,
    prefill=prefill,
    extend=extend,
    unembed=unembed or (lambda params, hidden: hidden),
    init_cache=init_cache,
  )


def from_linen(
  module: Any, positions: str | None = None, mask: str | None = None
) -> LM:
  """Builds an LM from a flax.linen module.

      lm = from_linen(Transformer(vocab_size=256), positions="position_ids")

  The module must be causal. `module(ids [N, S]) -> logits [N, S, V]` is called
  without random keys (no dropout). `positions` and `mask` name its arguments,
  if any, for positions [N, S] and a mask [N, S] that is True on real tokens.
  `init` raises ValueError for collections other than "params".
  """
  keywords = _keywords(positions, mask)

  def init(key: Key[Array, ""]) -> Params:
    ids = jnp.zeros((1, 1), jnp.int32)
    arguments = keywords(ids, jnp.ones((1, 1), bool))
    variables = dict(module.init(random_key(key), ids, **arguments))
    params = variables.pop("params", {})
    if variables:
      raise ValueError(
        f"the module has the collections {sorted(variables)} besides 'params': "
        "pass a function that supplies them to from_apply"
      )
    return params

  def apply(params, ids, positions, mask):
    arguments = keywords(positions, mask)
    return module.apply({"params": params}, ids, **arguments)

  return from_apply(apply, init)


def from_nnx(
  module_or_factory: Any, positions: str | None = None, mask: str | None = None
) -> LM:
  """Builds an LM from a flax.nnx module, or a function `(rngs) -> module`.

      lm = from_nnx(lambda rngs: Transformer(vocab_size=256, rngs=rngs))
      lm = from_nnx(pretrained)

  The module is called as in `from_linen`, but in evaluation mode. The LM's
  parameters are a nested dict of its `nnx.Param`s; other variables do not
  change. If you pass a module, `init` copies its parameters, whatever the key.
  """
  from flax import nnx  # may not support a newer jax

  keywords = _keywords(positions, mask)
  split = lambda module: nnx.split(module, nnx.Param, ...)
  if isinstance(module_or_factory, nnx.Module):
    build = lambda key: module_or_factory
    graphdef, template, frozen = split(module_or_factory)
  else:
    build = lambda key: module_or_factory(nnx.Rngs(key))
    key = seed_key(0)
    # XLA computes only the returned values, not the parameters.
    graphdef, template, _ = split(nnx.eval_shape(lambda: build(key)))
    frozen = jax.jit(lambda: split(build(key))[2])()

  def init(key: Key[Array, ""]) -> Params:
    params = nnx.to_pure_dict(split(build(random_key(key)))[1])
    return jax.tree.map(jnp.copy, params)  # the copy may be donated

  def apply(params, ids, positions, mask):
    # Copy the containers, because a merged module may write into them.
    state, variables = jax.tree.map(lambda x: x, (template, frozen))
    nnx.replace_by_pure_dict(state, params)
    module = nnx.merge(graphdef, state, variables)
    module.eval()
    return module(ids, **keywords(positions, mask))

  return from_apply(apply, init)


def check_causal(lm: LM, params: Params, length: int = 8) -> None:
  """Raises ValueError if tokens of a model see later tokens.

  Compares the log-probabilities of two random completions that differ in their
  second half. Rows have `length` tokens, and the first one is the prompt; pass
  the length of your longest row to test the number of positions, too. Call it
  outside of jit, with parameters that are not all zero.
  """
  if length < 3:
    raise ValueError(f"length={length} must be at least 3")
  prompt = jnp.zeros((1, 1), jnp.int32)
  prefix = lm.prefill(params, prompt, jnp.ones((1, 1), bool))
  vocabulary = lm.unembed(params, prefix.last_hidden).shape[-1]
  half = (length - 1) // 2
  ids = jax.random.randint(seed_key(0), (length - 1,), 0, vocabulary)
  other = ids.at[half:].set((ids[half:] + 1) % vocabulary)
  hidden = lm.extend(params, prefix, jnp.stack([ids, other])[None])[0]
  logits = lm.unembed(params, hidden)[0].astype(jnp.float32)
  logprobs = jax.nn.log_softmax(logits)
  if jnp.isnan(logprobs).any():
    raise ValueError(
      f"log-probabilities of a row of {length} tokens are nan: the model has "
      "fewer positions or, if a shorter row gives nan too, bad parameters"
    )
  change = jnp.nan_to_num(jnp.abs(jnp.diff(logprobs, axis=0)))
  before = float(change[:, :half].max())
  after = float(change[:, half:].max())
  if before > max(1e-6, 1e-3 * after):  # more than rounding
    raise ValueError(
      "the model is not causal: changing the end of a completion changes "
      f"log-probabilities at its beginning by up to {before:.2g} (at the end: "
      f"{after:.2g}). Give its attention a causal mask"
    )


def _rows(
  prefix: Prefix,
  ids: Int[Array, "B G T"],
  positions: Int[Array, "B G T"],
  filled: Int[Array, "B G 1"],
) -> tuple[Int[Array, "N S"], Int[Array, "N S"], Bool[Array, "N S"]]:
  """Joins prompts and the first `filled` completion tokens of each row."""
  batch, group_size, size = ids.shape
  slots = jnp.arange(prefix.state.shape[1] + size)[None, None]
  prompt = jnp.pad(prefix.state, ((0, 0), (0, size)))[:, None]
  length = prefix.length[:, None, None]
  offset = slots - length  # [B, 1, S]: negative in the prompt
  token = jnp.clip(offset, 0, size - 1)
  token = jnp.broadcast_to(token, (batch, group_size, slots.size))
  completion = jnp.take_along_axis(ids, token, axis=2)
  in_sequence = length + jnp.take_along_axis(positions, token, axis=2)
  in_prompt = offset < 0
  rows = jnp.where(in_prompt, prompt, completion)
  row_positions = jnp.where(in_prompt | (offset >= size), slots, in_sequence)
  mask = jnp.broadcast_to(offset < filled, rows.shape)
  shape = batch * group_size, slots.size
  return tuple(x.reshape(shape) for x in (rows, row_positions, mask))


def _take(hidden: Float[Array, "N S D"], slots: Int[Array, "N T"]) -> Array:
  return jnp.take_along_axis(hidden, slots[:, :, None], axis=1)


def _keywords(*names: str | None) -> Callable[..., dict[str, Array]]:
  """Returns a function `(*values) -> {name: value}` without unnamed values."""
  pairs = lambda values: zip(names, values, strict=True)
  return lambda *values: {name: x for name, x in pairs(values) if name}
