"""The loops over tokens that `rollout` samples with.

None of them changes a sample: token t of a sample draws from the sample's own
key and t alone. What they change is the work: `in_stages` follows the tokens
that are in the cache and the samples that are not done, `through_slots` the
memory that there is.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from grpojax.core import compaction
from grpojax.core.compaction import Compaction, take
from grpojax.core.mesh import constrain
from grpojax.core.sampling import Sampling, sample
from grpojax.core.types import LM, Cache, Params, Prefix


class Decoding(NamedTuple):
  """How the samples are computed.

  Attributes:
    stages: lengths that the cache takes, one after another, each of 16 tokens
      at least; attention reads what has been begun. Each is compiled.
    compact: at the start of each stage but the first, take the samples that are
      not done together, in a batch of a half, a quarter or an eighth of the
      group (where no group has more of them); where a group is one sample, of
      a quarter of the prompts, in long stages (see `compaction.WORTH`). Each is
      compiled.
    slots: samples of each prompt that are in memory at once; the next begins
      where one is done. 0 is all of them; with fewer there are no stages.
  """

  stages: int = 4
  compact: bool = True
  slots: int = 0


class Samples(NamedTuple):
  """Completions, as far as they are drawn."""

  ids: Int[Array, "B G T"]
  logprobs: Float[Array, "B G T"]
  length: Int[Array, "B G"]
  finished: Bool[Array, "B G"]
  done: Bool[Array, "B G"]


class Setup(NamedTuple):
  """What does not change while decoding.

  Attributes:
    lm: prepared for decoding.
    params: likewise.
    prefix: of the prompts.
    keys: one of each sample.
    limit: tokens that each sample may have.
    eos: ids that end a completion.
    sampling: the distribution.
  """

  lm: LM
  params: Params
  prefix: Prefix
  keys: Key[Array, "B G"]
  limit: Int[Array, "B G"]
  eos: Int[Array, "_"]
  sampling: Sampling


def _rows(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: constrain(x, "batch", "group"), tree)


def _draw(
  setup: Setup,
  keys: Key[Array, "B G"],
  t: Int[Array, "..."],
  hidden: Float[Array, "B G D"],
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
  """Token t of each sample, and its log-probability.

  It draws from the sample's own key and t alone, so that neither the batch nor
  the order of the loop can change it.
  """
  fold = jnp.vectorize(jax.random.fold_in, signature="(),()->()")
  logits = setup.lm.unembed(setup.params, hidden)
  logits = constrain(logits, "batch", "group", "vocabulary")
  return sample(fold(keys, t), logits, setup.sampling)


def _append(
  setup: Setup,
  samples: Samples,
  of_samples: tuple[Key[Array, "B G"], Int[Array, "B G"]],
  t: Int[Array, ""],
  hidden: Float[Array, "B G D"],
) -> Samples:
  """Draws token t of every sample that is not done."""
  keys, limit = of_samples
  alive = ~samples.done
  ids, logprobs = _draw(setup, keys, t, hidden)

  def at_t(old, new):  # what is drawn for samples that are done is not written
    kept = jax.lax.dynamic_index_in_dim(old, t, axis=2, keepdims=False)
    return old.at[:, :, t].set(jnp.where(alive, new, kept))

  length = samples.length + alive
  ended = alive & jnp.isin(ids, setup.eos)
  return Samples(
    at_t(samples.ids, ids),
    at_t(samples.logprobs, logprobs),
    length,
    samples.finished | ended,
    samples.done | ended | (length >= limit),
  )


def _decode(
  setup: Setup,
  samples: Samples,
  of_samples: tuple[Key[Array, "B G"], Int[Array, "B G"]],
  cache: Cache,
  first: int,
  count: int,
) -> tuple[Samples, Cache]:
  """Tokens `first`, ... of all samples, `count` or until all are done."""

  def body(state):
    i, samples, cache = state
    t = first + i
    last = jax.lax.dynamic_slice_in_dim(samples.ids, t - 1, 1, axis=2)
    hidden, cache = setup.lm.extend(setup.params, setup.prefix, last, cache)
    samples = _append(setup, samples, of_samples, t, hidden[:, :, 0])
    return i + 1, samples, cache

  def goes_on(state):
    return (state[0] < count) & ~jnp.all(state[1].done)

  start = jnp.zeros((), jnp.int32), samples, cache
  return jax.lax.while_loop(goes_on, body, start)[1:]


def _stage_ends(count: int, stages: int) -> list[int]:
  """Where stages of about the same length end; in whole 16s but the last."""
  stages = min(stages, max(count // 16, 1))
  ends = {round(count * i / stages / 16) * 16 for i in range(1, stages)}
  return [*sorted(ends), count]


Loop = Callable[..., tuple[Samples, Cache]]


def _compacted(
  setup: Setup, how: Compaction | None, size: int, decode: Loop
) -> Loop:
  """`decode(setup, ...)` of `size` rows of each part, those not done first."""

  def run(samples, of_samples, cache):
    if how is None or size == how.size:
      return decode(setup, samples, of_samples, cache)
    order, few_setup = how.order(samples.done, size), setup
    few_of = lambda x: how.take(x, order)
    if how.of_prompts:
      prefix = setup.lm.map_prefix_rows(few_of, setup.prefix)
      few_setup = setup._replace(prefix=prefix)
    few, few_cache = decode(
      few_setup,
      _rows(jax.tree.map(few_of, samples)),
      jax.tree.map(few_of, of_samples),
      setup.lm.map_cache_rows(few_of, cache),
    )
    put = lambda new, x: how.put(new, x, order)
    return (
      _rows(jax.tree.map(put, few, samples)),
      setup.lm.map_cache_rows(put, few_cache, cache),
    )

  return run


def in_stages(setup: Setup, samples: Samples, decoding: Decoding) -> Samples:
  """Decodes all samples side by side, see `Decoding`.

  Args:
    setup: of the loop.
    samples: without a token.
    decoding: its stages and whether they are compacted. A model without
      `grow_cache` and `map_cache_rows` has one stage.
  """
  lm, (b, g, t_max) = setup.lm, samples.ids.shape
  of_samples = setup.keys, setup.limit
  first = setup.prefix.last_hidden[:, None]
  first = jnp.broadcast_to(first, (b, g, first.shape[-1]))
  samples = _append(setup, samples, of_samples, jnp.int32(0), first)
  if t_max == 1:
    return samples
  # Each token but the last is put into the cache, when the next one is drawn.
  growing = lm.grow_cache is not None and lm.map_cache_rows is not None
  ends = _stage_ends(t_max - 1, decoding.stages if growing else 1)
  cache, start = lm.init_cache(b, g, ends[0]), 0
  how = None
  if growing and decoding.compact:
    how = compaction.find((b, g), lm.map_prefix_rows is not None)
  for stage, end in enumerate(ends):
    if stage:
      cache = lm.grow_cache(cache, end - start)

    def decode(*args, first=start + 1, count=end - start):
      return _decode(*args, first, count)

    sizes = how.sizes(stage, end - start) if how else [g]
    branches = [_compacted(setup, how, size, decode) for size in sizes]
    alive = jnp.max(jnp.sum(~how.parted(samples.done), axis=1)) if how else g
    fits = sum(alive <= size for size in sizes[1:])  # in how many of these
    if len(sizes) > 1:  # nothing is moved where nothing is left
      branches.append(lambda samples, _, cache: (samples, cache))
      fits = jnp.where(alive == 0, len(sizes), fits)
    samples, cache = jax.lax.switch(fits, branches, samples, of_samples, cache)
    start = end
  return samples


class _Slots(NamedTuple):
  """What the slots hold.

  Attributes:
    sample: index of each slot's sample in its group's queue; past the end of
      the queue, the slot is idle.
    tokens: that the sample has.
    last: the last one of them.
    waiting: index of the sample that begins next, of each prompt.
  """

  sample: Int[Array, "B S"]
  tokens: Int[Array, "B S"]
  last: Int[Array, "B S"]
  waiting: Int[Array, "B"]


def _refill(slots: _Slots, drawn: Array, free: Bool[Array, "B S"]) -> _Slots:
  """The next samples begin in the slots that are free."""
  begun = jnp.cumsum(free, axis=1)
  return _Slots(
    jnp.where(free, slots.waiting[:, None] + begun - 1, slots.sample),
    jnp.where(free, 0, slots.tokens + 1),
    drawn,
    slots.waiting + begun[:, -1],
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
  slots = _Slots(places, zero, zero, jnp.full((b,), count))
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
    ids, logprobs = _draw(setup, keys, slots.tokens, hidden)
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
    slots = _refill(slots, ids, over & alive)
    return i + 1, _rows(samples), slots, cache

  def goes_on(state):
    # A sample begins, when one ends that began at most T before.
    return (state[0] < rounds * t_max) & ~jnp.all(state[1].done)

  cache = lm.init_cache(b, count, t_max)
  start = jnp.zeros((), jnp.int32), samples, slots, cache
  return jax.lax.while_loop(goes_on, body, start)[1]
