"""The loops over tokens that `rollout` samples with.

How the loop is cut changes no sample: token t of a sample draws from the
sample's own key and t alone. It changes the work: `in_stages` follows the
tokens that are in the cache and the samples that are not done,
`slots.through_slots` the memory that there is.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from grpojax.core import compaction, repetition
from grpojax.core.compaction import Compaction
from grpojax.core.mesh import constrain
from grpojax.core.options import (
  NOT_NEGATIVE,
  ONE_OR_MORE,
  frozen_options,
  option,
)
from grpojax.core.sampling import Sampling, sample
from grpojax.core.types import LM, Cache, Params, Prefix


@frozen_options
class Decoding:
  """Shape of the decoding loop, which changes no sample.

  A stage has 16 tokens at least, and attention reads the stages that have
  begun. Compaction, at the start of each stage but the first, takes the samples
  that are not done in a batch of a half, a quarter or an eighth of the group
  (where no group has more of them); where a group is one sample, of a quarter
  of the prompts. It is done in long stages only (`compaction.WORTH`). In a slot
  the next sample begins where one is done; with fewer slots than samples there
  are no stages.
  """

  stages: int = option(
    4,
    "lengths that the cache takes on the way, each compiled",
    within=ONE_OR_MORE,
  )
  compact: bool = option(True, "put the samples that are not done together")
  slots: int = option(
    0, "samples of each prompt in memory at once; 0 = all", within=NOT_NEGATIVE
  )


class Samples(NamedTuple):
  """Completions, as far as they are drawn.

  `seen` are the tokens that each sample or its prompt has; None without a
  repetition penalty, and where slots have them.
  """

  ids: Int[Array, "B G T"]
  logprobs: Float[Array, "B G T"]
  length: Int[Array, "B G"]
  finished: Bool[Array, "B G"]
  done: Bool[Array, "B G"]
  seen: Bool[Array, "B G V"] | None = None


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
    in_prompt: tokens that each prompt has; None without a repetition penalty.
  """

  lm: LM
  params: Params
  prefix: Prefix
  keys: Key[Array, "B G"]
  limit: Int[Array, "B G"]
  eos: Int[Array, "_"]
  sampling: Sampling
  in_prompt: Bool[Array, "B V"] | None = None


def rows(tree: PyTree) -> PyTree:
  """Arrays [B, G, ...], laid out over the mesh in context."""
  return jax.tree.map(lambda x: constrain(x, "batch", "group"), tree)


def draw(
  setup: Setup,
  keys: Key[Array, "B G"],
  t: Int[Array, "..."],
  hidden: Float[Array, "B G D"],
  seen: Bool[Array, "B G V"] | None,
) -> tuple[Int[Array, "B G"], Float[Array, "B G"], Bool[Array, "B G V"] | None]:
  """Token t of each sample, its log-probability, and `seen` with it.

  It draws from the sample's own key and t alone, so that neither the batch nor
  the order of the loop can change it.
  """
  fold = jnp.vectorize(jax.random.fold_in, signature="(),()->()")
  logits = setup.lm.unembed(setup.params, hidden)
  logits = constrain(logits, "batch", "group", "vocabulary")
  ids, logprobs = sample(fold(keys, t), logits, setup.sampling, seen)
  seen = None if seen is None else repetition.mark(seen, ids)
  return ids, logprobs, seen


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
  ids, logprobs, seen = draw(setup, keys, t, hidden, samples.seen)

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
    seen,
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
      rows(jax.tree.map(few_of, samples)),
      jax.tree.map(few_of, of_samples),
      setup.lm.map_cache_rows(few_of, cache),
    )
    put = lambda new, x: how.put(new, x, order)
    return (
      rows(jax.tree.map(put, few, samples)),
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
  if setup.in_prompt is not None:
    seen = jnp.broadcast_to(
      setup.in_prompt[:, None], (b, g, setup.in_prompt.shape[-1])
    )
    samples = samples._replace(seen=seen)
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
