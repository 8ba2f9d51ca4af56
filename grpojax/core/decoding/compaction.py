"""Decodes in batches that shrink as samples finish, where no kernel serves.

XLA computes whole arrays, so finished rows and empty slots of the cache cost as
much as others. On CPUs the token loop therefore runs in a sequence of shapes:
first the cache grows, then the batch shrinks to its unfinished rows.

    rows    all  all  all  a half  a quarter  an eighth
    slots   16   32   48   48      48         48
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core.decoding import (
  BETWEEN_CHECKS,
  Samples,
  Setup,
  constrain_samples,
  first_token,
  token_loop,
)
from grpojax.core.meshes import sample_cuts

LENGTHS = 4  # of the cache, each compiled
LEAST_TOKENS = 48  # of a rollout whose batch shrinks
HALVINGS = 3


def cache_lengths(tokens: int) -> list[int]:
  """Returns about equal steps up to `tokens`, multiples of 16 but the last."""
  count = min(LENGTHS, max(tokens // 16, 1))
  steps = {round(tokens * i / count / 16) * 16 for i in range(1, count)}
  return [*sorted(steps), tokens]


def batch_sizes(rows: int, tokens: int) -> list[int]:
  """Returns the smaller numbers of rows for which the loop is compiled."""
  if tokens < LEAST_TOKENS:
    return []
  sizes = {-(-rows // 2**i) for i in range(1, HALVINGS + 1)} - {rows}
  return sorted(sizes, reverse=True)


def _parts(b: int, g: int) -> int | None:
  """Returns the number of parts of B prompts, one for each group of devices.

  None if devices share a group: then the batch does not shrink, because no row
  may change its device.
  """
  parts, of_groups = sample_cuts(b, g)
  return None if of_groups > 1 else parts


def take(x: Array, order: Int[Array, "parts n"]) -> Array:
  """Takes rows of each part: [B, G, ...] -> [parts n, 1, ...]."""
  parts, n = order.shape
  x = x.reshape(parts, -1, *x.shape[2:])
  few = jax.vmap(lambda x, order: x[order])(x, order)
  return few.reshape(parts * n, 1, *x.shape[2:])


def put(new: Array, x: Array, order: Int[Array, "parts n"]) -> Array:
  """Writes rows [parts n, 1, ...] back into [B, G, ...]: inverts `take`."""
  parts, n = order.shape
  new = new.reshape(parts, n, *new.shape[2:])
  rows = x.reshape(parts, -1, *x.shape[2:])
  rows = jax.vmap(lambda x, order, new: x.at[order].set(new))(rows, order, new)
  return rows.reshape(x.shape)


def unfinished_first(
  done: Bool[Array, "B G"], parts: int, n: int
) -> Int[Array, "parts {n}"]:
  """Returns n rows of each part, unfinished ones first."""
  # False sorts before True, and a stable sort keeps the order of equal rows.
  return jnp.argsort(done.reshape(parts, -1), axis=1, stable=True)[:, :n]


def most_alive(samples: Samples, parts: int) -> Int[Array, ""]:
  """Returns the largest number of unfinished rows in a part."""
  alive = ~samples.done.reshape(parts, -1)
  return jnp.max(jnp.sum(alive, axis=1))


def _take_rows(setup: Setup, order: Int[Array, "parts n"]) -> Setup:
  """Returns the loop's inputs of these rows, each a group of one."""
  prompts, group = setup.limit.shape
  parts, _ = order.shape
  # Number of each row's prompt: rows of a part are numbered prompt by prompt.
  first = jnp.arange(parts)[:, None] * (prompts // parts)
  prompt = (first + order // group).reshape(-1)
  return setup._replace(
    keys=take(setup.keys, order),
    limit=take(setup.limit, order),
    prefix=setup.lm.map_prefix_rows(lambda x: x[prompt], setup.prefix),
  )


def decode(setup: Setup, samples: Samples) -> Samples:
  """Draws all tokens of empty samples.

  A model without `grow_cache` has a single loop, one without `map_cache_rows`
  and `map_prefix_rows` a single batch size.
  """
  lm = setup.lm
  b, g, t_max = samples.ids.shape
  samples = first_token(setup, samples)
  # A token enters the cache when the next is drawn, so the last never does.
  tokens = t_max - 1
  if not tokens:
    return samples
  if lm.grow_cache is None:
    cache = lm.init_cache(b, g, tokens)
    options = {"between_checks": BETWEEN_CHECKS}
    return token_loop(setup, samples, cache, tokens, **options)[0]
  parts = _parts(b, g)
  shrinks = parts and lm.map_cache_rows and lm.map_prefix_rows
  rows = b * g // (parts or 1)
  sizes = batch_sizes(rows, tokens) if shrinks else []

  def loop(setup, samples, cache, start, slots, smaller):
    def goes_on(samples):
      fits = jnp.max(jnp.where(samples.done, 0, samples.length)) <= slots
      return fits & (most_alive(samples, parts or 1) > smaller)

    return token_loop(setup, samples, cache, slots - start, goes_on=goes_on)

  # The cache grows while more rows are unfinished than a smaller batch has.
  smaller = sizes[0] if sizes else 0
  start = 0
  for slots in cache_lengths(tokens):
    grown = slots - start
    cache = lm.grow_cache(cache, grown) if start else lm.init_cache(b, g, grown)
    samples, cache = loop(setup, samples, cache, start, slots, smaller)
    start = slots
  # The batch shrinks. `places` are the rows' numbers in the whole batch.
  whole = few = samples
  places = jnp.broadcast_to(jnp.arange(rows), (parts or 1, rows))
  for n, smaller in zip(sizes, [*sizes, 0][1:], strict=True):
    order = unfinished_first(few.done, parts, n)
    places = jnp.take_along_axis(places, order, axis=1)
    setup = _take_rows(setup, order)
    take_rows = lambda x, order=order: take(x, order)
    few = constrain_samples(jax.tree.map(take_rows, few))
    cache = lm.map_cache_rows(take_rows, cache)
    few, cache = loop(setup, few, cache, 0, tokens, smaller)
    # All other rows are done and stay as they are.
    write = lambda new, x, places=places: put(new, x, places)
    whole = constrain_samples(jax.tree.map(write, few, whole))
  return whole
