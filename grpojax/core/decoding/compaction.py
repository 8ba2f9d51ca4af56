"""Decodes in batches that shrink as samples finish, where no kernel serves.

XLA computes whole arrays, so finished rows and empty slots of the cache cost as
much as others. Without a kernel that reads live slots only, as on CPUs, the
token loop therefore runs in a sequence of shapes: first the cache grows, then
the batch shrinks to its unfinished rows.

    rows    all  all  all  a half  a quarter  an eighth
    slots   16   32   48   48      48         48
"""

import functools

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
from grpojax.core.types import Cache

LENGTHS = 4  # maximum lengths of the cache, each compiled
HALVINGS = 3  # maximum halvings of the batch
TOKENS = 32  # of a rollout for each length and halving, to compile few shapes


def shapes(rows: int, tokens: int, shrinks: bool) -> list[tuple[int, int]]:
  """Returns the numbers of rows and slots for which the loop is compiled.

  The cache grows to `tokens` slots in about equal steps of multiples of 16.
  """
  worth = tokens // TOKENS
  count = min(LENGTHS, max(worth, 1))
  steps = {round(tokens * i / count / 16) * 16 for i in range(1, count)}
  growing = [(rows, slots) for slots in [*sorted(steps), tokens]]
  halvings = min(HALVINGS, worth) if shrinks else 0
  sizes = {-(-rows // 2**i) for i in range(1, halvings + 1)} - {rows}
  return growing + [(n, tokens) for n in sorted(sizes, reverse=True)]


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


def _fills(
  parts: int, slots: int, smaller: int, samples: Samples
) -> Bool[Array, ""]:
  """Returns True while tokens fit the slots and rows fit no smaller batch."""
  longest = jnp.max(jnp.where(samples.done, 0, samples.length))
  return (longest <= slots) & (most_alive(samples, parts) > smaller)


def _take_rows(
  setup: Setup, samples: Samples, cache: Cache, order: Int[Array, "parts n"]
) -> tuple[Setup, Samples, Cache]:
  """Returns the loop's inputs of these rows, each a group of one."""
  prompts, group = setup.limit.shape
  parts, _ = order.shape
  # Number of each row's prompt: rows of a part are numbered prompt by prompt.
  first = jnp.arange(parts)[:, None] * (prompts // parts)
  prompt = (first + order // group).reshape(-1)
  rows = functools.partial(take, order=order)
  setup = setup._replace(
    keys=rows(setup.keys),
    limit=rows(setup.limit),
    prefix=setup.lm.map_rows(lambda x: x[prompt], setup.prefix),
  )
  samples = constrain_samples(jax.tree.map(rows, samples))
  return setup, samples, setup.lm.map_rows(rows, cache)


def decode(setup: Setup, samples: Samples) -> Samples:
  """Draws all tokens of empty samples.

  A model without `grow_cache` has a single loop, one without `map_rows` a
  single batch size.
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
  cuts = _parts(b, g)
  parts = cuts or 1
  rows = b * g // parts
  shrinks = bool(cuts and lm.map_rows)
  sequence = shapes(rows, tokens, shrinks)
  _, room = sequence[0]
  cache = lm.init_cache(b, g, room)
  whole = few = samples
  # Numbers of the batch's rows in the whole batch
  places = jnp.broadcast_to(jnp.arange(rows), (parts, rows))
  for i, (n, slots) in enumerate(sequence):
    if slots > room:
      cache = lm.grow_cache(cache, slots - room)
    if n < places.shape[1]:
      order = unfinished_first(few.done, parts, n)
      setup, few, cache = _take_rows(setup, few, cache, order)
      places = jnp.take_along_axis(places, order, axis=1)
    smaller = next((m for m, _ in sequence[i:] if m < n), 0)
    goes_on = functools.partial(_fills, parts, slots, smaller)
    few, cache = token_loop(setup, few, cache, slots, goes_on=goes_on)
    room = slots
    if n < rows:  # all other rows are done and stay as they are
      write = lambda new, x, places=places: put(new, x, places)
      whole = constrain_samples(jax.tree.map(write, few, whole))
    else:
      whole = few
  return whole
