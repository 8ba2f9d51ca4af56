"""Continuous batching: the samples of a group go through a few slots.

A slot takes the next sample when its own is done; which one computes a sample,
and when, changes nothing of it, for its tokens draw from its own key.

    samples of 5, 2, 2, 3 tokens in two slots    0 0 0 0 0
                                                 1 1 2 2 3 3 3
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core.decoding import (
  Samples,
  Setup,
  constrain_samples,
  draw,
  take,
)
from grpojax.core.mesh import sample_cuts

_put = jax.vmap(lambda x, row, new: x.at[row].set(new, mode="drop"))
_put_token = jax.vmap(lambda x, row, t, new: x.at[row, t].set(new, mode="drop"))


class _Slots(NamedTuple):
  """State of the slots.

  Attributes:
    sample: Index of each slot's sample in its group's queue; past the end of
      the queue, the slot is idle.
    tokens: Number of tokens that the sample has.
    last: Last one of them.
    waiting: Index of the sample that begins next, of each prompt.
    seen: That of `Samples`.
  """

  sample: Int[Array, "B S"]
  tokens: Int[Array, "B S"]
  last: Int[Array, "B S"]
  waiting: Int[Array, "B"]
  seen: Bool[Array, "B S V"] | None


def _refill(
  setup: Setup, slots: _Slots, drawn: Array, free: Bool[Array, "B S"]
) -> _Slots:
  """Begins the next samples in the slots that are free."""
  seen = slots.seen
  if seen is not None:
    seen = jnp.where(free[..., None], setup.in_prompt[:, None], seen)
  begun = jnp.cumsum(free, axis=1)
  return _Slots(
    sample=jnp.where(free, slots.waiting[:, None] + begun - 1, slots.sample),
    tokens=jnp.where(free, 0, slots.tokens + 1),
    last=drawn,
    waiting=slots.waiting + begun[:, -1],
    seen=seen,
  )


def _begin(setup: Setup, b: int, count: int) -> _Slots:
  """Returns [B, S] slots that hold the first samples of the queue."""
  seen, zero = None, jnp.zeros((b, count), jnp.int32)
  if setup.in_prompt is not None:
    seen = jnp.repeat(setup.in_prompt[:, None], count, axis=1)
  first = jnp.broadcast_to(jnp.arange(count), (b, count))
  return _Slots(first, zero, zero, jnp.full((b,), count), seen)


def through_slots(setup: Setup, samples: Samples, count: int) -> Samples:
  """Decodes the samples of a group through a few slots (continuous batching).

  The cache is a ring of T tokens, to which all slots write at the same place: a
  slot's sample has the last tokens of it, as many as it is long.

  Raises:
    ValueError: the model's cache has no rows of different lengths (no
      `map_cache_rows`), or devices hold parts of a group.
  """
  lm, (b, g, t_max) = setup.lm, samples.ids.shape
  if lm.map_cache_rows is None:
    raise ValueError(
      f"slots={count}: this model's cache cannot hold rows of different "
      "lengths; set slots=0"
    )
  if sample_cuts(b, g)[1] > 1:
    raise ValueError(
      f"slots={count}: the mesh cuts groups ({b} prompts are fewer than it has "
      "devices for rows); set slots=0 or take more prompts"
    )
  queue = jnp.argsort(samples.done, axis=1, stable=True)
  queued = jnp.sum(~samples.done, axis=1, keepdims=True)
  first = setup.prefix.last_hidden[:, None]

  def body(state):
    i, samples, slots, cache = state
    alive = slots.sample < queued
    chosen = take(queue, jnp.minimum(slots.sample, g - 1))
    # The last token of each slot goes through the model, but where a sample
    # begins: its prompt predicts the first token.
    positions = jnp.maximum(slots.tokens - 1, 0)
    hidden, cache = lm.extend(
      setup.params,
      setup.prefix,
      slots.last[..., None],
      cache,
      positions=positions[..., None],
    )
    fresh = (slots.tokens == 0)[..., None]
    hidden = jnp.where(fresh, first, hidden[:, :, 0])
    keys, limit = take(setup.keys, chosen), take(setup.limit, chosen)
    ids, logprobs, seen = draw(setup, keys, slots.tokens, hidden, slots.seen)
    ended = jnp.isin(ids, setup.eos)
    over = ended | (slots.tokens + 1 >= limit)
    # What idle slots draw is written to sample number G, which there is not.
    row, t = jnp.where(alive, chosen, g), slots.tokens
    samples = Samples(
      ids=_put_token(samples.ids, row, t, ids),
      logprobs=_put_token(samples.logprobs, row, t, logprobs),
      length=_put(samples.length, row, t + 1),
      finished=_put(samples.finished, row, ended),
      done=_put(samples.done, row, over),
    )
    slots = _refill(setup, slots._replace(seen=seen), ids, over & alive)
    return i + 1, constrain_samples(samples), slots, cache

  def goes_on(state):
    # A sample begins, when one ends that began at most T before.
    return (state[0] < -(-g // count) * t_max) & ~jnp.all(state[1].done)

  slots, cache = _begin(setup, b, count), lm.init_cache(b, count, t_max)
  start = jnp.zeros((), jnp.int32), samples, slots, cache
  return jax.lax.while_loop(goes_on, body, start)[1]
