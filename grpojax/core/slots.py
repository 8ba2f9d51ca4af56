"""Continuous batching: the samples of a group go through a few slots.

Which slot computes a sample, and when, changes nothing of it: its tokens draw
from its own key.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core import compaction
from grpojax.core.compaction import take
from grpojax.core.decoding import Samples, Setup, draw, rows


class _Slots(NamedTuple):
  """What the slots hold.

  Attributes:
    sample: index of each slot's sample in its group's queue; past the end of
      the queue, the slot is idle.
    tokens: that the sample has.
    last: the last one of them.
    waiting: index of the sample that begins next, of each prompt.
    seen: tokens that the sample or its prompt has; None without a repetition
      penalty.
  """

  sample: Int[Array, "B S"]
  tokens: Int[Array, "B S"]
  last: Int[Array, "B S"]
  waiting: Int[Array, "B"]
  seen: Bool[Array, "B S V"] | None


def _refill(
  setup: Setup, slots: _Slots, drawn: Array, free: Bool[Array, "B S"]
) -> _Slots:
  """The next samples begin in the slots that are free."""
  seen = slots.seen
  if seen is not None:
    seen = jnp.where(free[..., None], setup.in_prompt[:, None], seen)
  begun = jnp.cumsum(free, axis=1)
  return _Slots(
    jnp.where(free, slots.waiting[:, None] + begun - 1, slots.sample),
    jnp.where(free, 0, slots.tokens + 1),
    drawn,
    slots.waiting + begun[:, -1],
    seen,
  )


def through_slots(setup: Setup, samples: Samples, count: int) -> Samples:
  """Decodes the samples of a group through a few slots (continuous batching).

  The cache is a ring of T tokens, to which all slots write at the same place: a
  slot's sample has the last tokens of it, as many as it is long.

  Args:
    setup: of the loop.
    samples: without a token.
    count: S, slots of each prompt.

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
  if compaction.cut((b, g))[1]:
    raise ValueError(
      f"slots={count}: the mesh cuts groups ({b} prompts are fewer than it has "
      "devices for rows); set slots=0 or take more prompts"
    )
  order = jnp.argsort(samples.done, axis=1, stable=True)  # the queue
  queued = jnp.sum(~samples.done, axis=1, keepdims=True)
  places = jnp.broadcast_to(jnp.arange(count), (b, count))
  zero = jnp.zeros((b, count), jnp.int32)
  seen = None
  if setup.in_prompt is not None:
    seen = jnp.repeat(setup.in_prompt[:, None], count, axis=1)
  slots = _Slots(places, zero, zero, jnp.full((b,), count), seen)
  first = setup.prefix.last_hidden[:, None]
  rounds = -(-g // count)

  def body(state):
    i, samples, slots, cache = state
    alive = slots.sample < queued
    chosen = take(order, jnp.minimum(slots.sample, g - 1))
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
    # What idle slots draw goes to a sample that there is not.
    row = jnp.where(alive, chosen, g)
    at = jax.vmap(lambda x, row, t, new: x.at[row, t].set(new, mode="drop"))
    of = jax.vmap(lambda x, row, new: x.at[row].set(new, mode="drop"))
    samples = Samples(
      at(samples.ids, row, slots.tokens, ids),
      at(samples.logprobs, row, slots.tokens, logprobs),
      of(samples.length, row, slots.tokens + 1),
      of(samples.finished, row, ended),
      of(samples.done, row, over),
    )
    slots = _refill(setup, slots._replace(seen=seen), ids, over & alive)
    return i + 1, rows(samples), slots, cache

  def goes_on(state):
    # A sample begins, when one ends that began at most T before.
    return (state[0] < rounds * t_max) & ~jnp.all(state[1].done)

  cache = lm.init_cache(b, count, t_max)
  start = jnp.zeros((), jnp.int32), samples, slots, cache
  return jax.lax.while_loop(goes_on, body, start)[1]
