"""The decoding loops of `rollout`.

Token t of a sample is drawn from the sample's own key and t alone, so the shape
of the loop changes the work but no sample. In `in_stages` the cache grows with
the tokens, and the batch shrinks as samples finish:

    stage 0   tokens 1 .. 16    cache of 16   all samples
    stage 1   tokens 17 .. 32   cache of 32   unfinished samples: G, a half, ...
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree, UInt32

from grpojax.core import ends as ends_lib
from grpojax.core import environment as environment_lib
from grpojax.core.decoding.sampling import (
  Sampling,
  sample,
  sample_parts,
  uniform,
)
from grpojax.core.meshes import constrain, runs_kernels, sample_cuts
from grpojax.core.options import frozen_options, one_or_more, option
from grpojax.core.random_keys import random_key
from grpojax.core.types import LM, Cache, ExtendOutput, Params, Prefix, Prompts

LEAST_TOKENS = 48
"""Tokens of the shortest stage that is compiled for several batch sizes."""


@frozen_options
class Decoding:
  """Shape of the decoding loop; it changes no sample.

  All stages but the last end at multiples of 16 tokens, and attention reads the
  stages so far. Compaction, at the start of each long stage but the first,
  decodes unfinished samples in a batch of a half, a quarter or an eighth of the
  group (in groups of a single sample, a quarter of the prompts).
  """

  stages: int = one_or_more(4, "number of cache lengths, each compiled")
  compact: bool = option(True, "decode unfinished samples in a smaller batch")


class Samples(NamedTuple):
  """Completions so far; `experts` are packed (see `unpack_experts`)."""

  ids: Int[Array, "B G T"]
  logprobs: Float[Array, "B G T"]
  length: Int[Array, "B G"]
  finished: Bool[Array, "B G"]
  done: Bool[Array, "B G"]
  episodes: environment_lib.Episodes | None = None
  experts: UInt32[Array, "B G T W"] | None = None
  stop_state: Int[Array, "B G"] | None = None


class Setup(NamedTuple):
  """Constant inputs of the decoding loop."""

  lm: LM  # prepared for decoding
  params: Params  # prepared with it
  prefix: Prefix
  keys: Key[Array, "B G"]
  limit: Int[Array, "B G"]  # maximum tokens of each sample
  ends: ends_lib.Ends  # on the device
  sampling: Sampling
  environment: environment_lib.Environment | None = None


def constrain_samples(tree: PyTree) -> PyTree:
  """Shards arrays [B, G, ...] over the mesh in context."""
  return jax.tree.map(lambda x: constrain(x, "batch", "group"), tree)


def token_limits(
  prompts: Prompts, budgets: Int[Array, "B G"]
) -> Int[Array, "B G"]:
  """Returns the token limit of each sample; 0 for the batch's padding."""
  real = jnp.any(prompts.prompt_mask, axis=-1, keepdims=True)
  return jnp.where(real, budgets, 0)


def sample_keys(
  key: Any, shape: tuple[int, int], first_prompt: Array | int
) -> Key[Array, "B G"]:
  """Returns each sample's key, independent of the rest of the batch."""
  b, g = shape
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  # Samples are numbered over the whole batch, so parts of it get equal keys.
  numbers = first_prompt * g + jnp.arange(b * g)
  return fold(random_key(key), numbers).reshape(b, g)


def _pack_experts(experts: Integer[Array, "*n X"]) -> UInt32[Array, "*n W"]:
  """Packs small integers into words: a TPU cannot write a byte by itself."""
  *tokens, x = experts.shape
  in_word = 4 // experts.dtype.itemsize
  # Pad X to whole words; the cast then merges the last axis, [*n, W, in_word],
  # unless a number is a word.
  experts = jnp.pad(experts, [*[(0, 0)] * len(tokens), (0, -x % in_word)])
  experts = experts.reshape(*tokens, -1, in_word)
  words = jax.lax.bitcast_convert_type(experts, jnp.uint32)
  return words.reshape(*tokens, -1)


def unpack_experts(
  words: UInt32[Array, "B G T W"] | None,
  prompt_experts: Integer[Array, "B P X"] | None,
) -> Integer[Array, "B G T X"] | None:
  """Unpacks the experts of completions; returns None for None."""
  if words is None:
    return None
  # The cast adds an axis [..., W, in_word]; the slice drops the words' padding.
  experts = jax.lax.bitcast_convert_type(words, prompt_experts.dtype)
  experts = experts.reshape(*words.shape[:3], -1)
  return experts[..., : prompt_experts.shape[-1]]


def no_samples(
  limit: Int[Array, "B G"],
  t_max: int,
  pad_id: int,
  ends: ends_lib.Ends,
  prompt_experts: Integer[Array, "B P X"] | None,
) -> Samples:
  """Returns empty samples, with packed experts if prompts have experts."""
  experts = None
  if prompt_experts is not None:
    *_, w = jax.eval_shape(_pack_experts, prompt_experts).shape
    experts = jnp.zeros((*limit.shape, t_max, w), jnp.uint32)
  return Samples(
    ids=jnp.full((*limit.shape, t_max), pad_id, jnp.int32),
    logprobs=jnp.zeros((*limit.shape, t_max), jnp.float32),
    length=jnp.zeros(limit.shape, jnp.int32),
    finished=jnp.zeros(limit.shape, bool),
    # The batch's padding is done before its first token.
    done=limit <= 0,
    experts=experts,
    stop_state=ends_lib.first_state(ends, limit),
  )


take = jax.vmap(lambda x, index: x[index])
"""Takes entries of the second axis: [n, m, ...], [n, few] -> [n, few, ...]."""


class Compaction(NamedTuple):
  """Moves unfinished samples into a smaller batch.

  Rows are seen as [parts, size, ...]: the samples of each group or, in groups
  of a single sample, the prompts of each device. So rows never change devices.

      done     [[0, 1, 1, 0], [1, 1, 0, 1]]
      order 2  [[0, 3], [2, 0]]  two rows of each part, unfinished ones first
  """

  parts: int
  size: int  # number of rows of each part
  of_prompts: bool  # a row is a prompt

  def sizes(self, stage: int, tokens: int) -> list[int]:
    """Returns the compiled sizes of a part in a stage, descending.

    Stage 0 has all rows. With single samples per prompt (as in evaluations,
    which are rare) there are at most two sizes.
    """
    if tokens < LEAST_TOKENS:
      return [self.size]
    halvings = [0, 2] if self.of_prompts else range(4)
    # Samples finish gradually: a stage has one more size than the one before.
    allowed = halvings[: stage + 1]
    return sorted({-(-self.size // 2**i) for i in allowed}, reverse=True)

  def most_alive(self, done: Bool[Array, "B G"]) -> Int[Array, ""]:
    """Returns the largest number of unfinished rows in a part."""
    done = done.reshape(self.parts, self.size)
    return jnp.max(jnp.sum(~done, axis=1))

  def order(
    self, done: Bool[Array, "B G"], size: int
  ) -> Int[Array, "parts {size}"]:
    """Returns `size` rows of each part, unfinished ones first."""
    done = done.reshape(self.parts, self.size)
    # False sorts before True, and a stable sort keeps the order of equal rows.
    return jnp.argsort(done, axis=1, stable=True)[:, :size]

  def _by_part(self, x: Array) -> Array:
    """Reshapes [B, G, ...] or, of prompts, [B, ...] to [parts, size, ...]."""
    lead = 1 if self.of_prompts else 2
    return x.reshape(self.parts, self.size, *x.shape[lead:])

  def take(self, x: Array, order: Int[Array, "parts few"]) -> Array:
    """Takes rows of an array [B, G, ...] or, of prompts, [B, ...]."""
    few = take(self._by_part(x), order)
    return few.reshape(-1, *x.shape[1:]) if self.of_prompts else few

  def put(self, new: Array, x: Array, order: Int[Array, "parts few"]) -> Array:
    """Writes rows back into an array, the inverse of `take`."""
    new = new.reshape(*order.shape, *x.shape[1 if self.of_prompts else 2 :])
    put = jax.vmap(lambda x, order, new: x.at[order].set(new))
    return put(self._by_part(x), order, new).reshape(x.shape)


def find_compaction(shape: tuple[int, int], prompts: bool) -> Compaction | None:
  """Returns the compaction of B and G samples, or None if it is impossible."""
  b, g = shape
  parts, of_groups = sample_cuts(b, g)
  if g > 1:  # no sample may change its device
    return None if of_groups > 1 else Compaction(b, g, False)
  if not prompts or b == parts:
    return None
  return Compaction(parts, b // parts, True)


def draw(
  setup: Setup,
  keys: Key[Array, "B G"],
  t: Int[Array, "..."],
  hidden: Float[Array, "B G D"],
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
  """Draws token t of each sample; returns ids and log-probabilities."""
  # t is one number in `in_stages`, and a number per row, [B, G], in `chunks`.
  fold = jnp.vectorize(jax.random.fold_in, signature="(),()->()")
  keys = fold(keys, t)
  lm = setup.lm
  sampling = setup.sampling
  by_parts = lm.draw_parts is not None and sampling.is_whole
  # `draw_parts` keeps no logits in memory; it cannot cut tokens or be greedy.
  if by_parts and runs_kernels():
    # A number selects the part, and two numbers select the token in each part.
    choose_part, *within = jnp.moveaxis(uniform(keys, 3), -1, 0)
    within = jnp.stack(within, axis=-1)
    temperature = sampling.temperature
    parts = lm.draw_parts(setup.params, hidden, within, temperature)
    return sample_parts(parts, choose_part)
  logits = lm.unembed(setup.params, hidden)
  logits = constrain(logits, "batch", "group", "vocabulary")
  return sample(keys, logits, sampling)


def prefill(
  lm: LM, params: Params, prompts: Prompts, record: bool
) -> tuple[Prefix, Integer[Array, "B P X"] | None]:
  """Runs the prompts; also returns their experts if `record`."""
  ids = prompts.prompt_ids
  mask = prompts.prompt_mask
  if not record:
    return lm.prefill(params, ids, mask), None
  if not lm.has_experts:
    raise ValueError(
      "record_experts needs a model with experts (LM.has_experts)"
    )
  prefix = lm.prefill(params, ids, mask, record=True)
  return prefix.replace(experts=None), prefix.experts


def extend(
  setup: Setup,
  ids: Int[Array, "B G S"],
  cache: Cache,
  record: bool,
  **positions: Any,
) -> tuple[Float[Array, "B G S D"], Cache, UInt32[Array, "B G S W"] | None]:
  """Runs the next tokens; also returns their packed experts if `record`."""
  # Only models with experts have the parameter `record`.
  options = positions | ({"record": True} if record else {})
  output = setup.lm.extend(setup.params, setup.prefix, ids, cache, **options)
  hidden, cache, experts = ExtendOutput(*output)
  return hidden, cache, _pack_experts(experts) if record else None


def _append(
  setup: Setup,
  samples: Samples,
  t: Int[Array, ""],
  hidden: Float[Array, "B G D"],
) -> Samples:
  """Draws token t of each unfinished sample, or copies an observation's."""
  alive = ~samples.done
  episodes = samples.episodes
  ids, logprobs = draw(setup, setup.keys, t, hidden)
  # Rows with unread tokens of an observation take the next of these instead.
  drawn = alive
  if episodes is not None:
    drawn = alive & ~episodes.forced
    ids = episodes.next_ids(ids)
    logprobs = jnp.where(drawn, logprobs, 0.0)

  def at_t(old, new):  # finished samples keep their padding
    before = jax.lax.dynamic_index_in_dim(old, t, axis=2, keepdims=False)
    return old.at[:, :, t].set(jnp.where(alive, new, before))

  rows = at_t(samples.ids, ids)
  length = samples.length + alive
  is_end, state = ends_lib.advance(setup.ends, samples.stop_state, ids)
  ended = over = drawn & is_end
  # Observations and ends reset the state: a stop string lies within a turn.
  state = ends_lib.within(state, drawn, is_end)
  if episodes is not None:
    # Turn -1 marks tokens of observations.
    turn = jnp.where(drawn, episodes.turn, -1)
    episodes = episodes._replace(
      read=episodes.read + (alive & ~drawn), turns=at_t(episodes.turns, turn)
    )
    # From here on `ended` marks trajectories that the environment has ended.
    episodes, ended, over = environment_lib.advance(
      setup.environment, episodes, rows, setup.keys, length, setup.limit, ended
    )
  return samples._replace(
    ids=rows,
    logprobs=at_t(samples.logprobs, logprobs),
    length=length,
    finished=samples.finished | ended,
    done=samples.done | over | (length >= setup.limit),
    episodes=episodes,
    stop_state=state,
  )


def _decode(
  setup: Setup, samples: Samples, cache: Cache, stage: tuple[int, int]
) -> tuple[Samples, Cache]:
  """Draws tokens start + 1 to end; stops early once all samples are done."""
  start, end = stage

  def body(state):
    i, samples, cache = state
    t = start + 1 + i
    # The token before, [B, G, 1], enters the cache and predicts token t.
    last = jax.lax.dynamic_slice_in_dim(samples.ids, t - 1, 1, axis=2)
    record = samples.experts is not None
    hidden, cache, experts = extend(setup, last, cache, record)
    if record:  # of finished samples too: the completion mask excludes them
      put = jax.lax.dynamic_update_slice_in_dim
      experts = put(samples.experts, experts, t - 1, axis=2)
      samples = samples._replace(experts=experts)
    samples = _append(setup, samples, t, hidden[:, :, 0])
    return i + 1, samples, cache

  def goes_on(state):
    return (state[0] < end - start) & ~jnp.all(state[1].done)

  first = jnp.zeros((), jnp.int32), samples, cache
  return jax.lax.while_loop(goes_on, body, first)[1:]


def _stage_ends(count: int, stages: int) -> list[int]:
  """Returns the ends of about equal stages: multiples of 16, but the last."""
  stages = min(stages, max(count // 16, 1))
  ends = {round(count * i / stages / 16) * 16 for i in range(1, stages)}
  return [*sorted(ends), count]


def _decode_few(
  setup: Setup,
  compaction: Compaction | None,
  size: int,
  stage: tuple[int, int],
  samples: Samples,
  cache: Cache,
) -> tuple[Samples, Cache]:
  """Runs `_decode` on `size` rows of each part, unfinished ones first."""
  if compaction is None or size == compaction.size:
    return _decode(setup, samples, cache, stage)
  # Take these rows of all inputs. Prompts belong to whole groups, so the prefix
  # stays as it is unless rows are prompts.
  order = compaction.order(samples.done, size)
  lm = setup.lm
  take = lambda x: compaction.take(x, order)
  few_setup = setup._replace(keys=take(setup.keys), limit=take(setup.limit))
  if compaction.of_prompts:
    prefix = lm.map_prefix_rows(take, setup.prefix)
    few_setup = few_setup._replace(prefix=prefix)
  few = constrain_samples(jax.tree.map(take, samples))
  few_cache = lm.map_cache_rows(take, cache)
  few, few_cache = _decode(few_setup, few, few_cache, stage)
  # Write them back; all other rows are done and stay as they are.
  put = lambda new, x: compaction.put(new, x, order)
  samples = constrain_samples(jax.tree.map(put, few, samples))
  return samples, lm.map_cache_rows(put, few_cache, cache)


def in_stages(setup: Setup, samples: Samples, decoding: Decoding) -> Samples:
  """Decodes empty samples in stages, see `Decoding`.

  A model without `grow_cache` and `map_cache_rows` has a single stage.
  """
  lm = setup.lm
  b, g, t_max = samples.ids.shape
  # The state of the prompt's last token predicts the first token.
  first = setup.prefix.last_hidden[:, None]
  first = jnp.broadcast_to(first, (b, g, first.shape[-1]))
  samples = _append(setup, samples, jnp.int32(0), first)
  if t_max == 1:
    return samples
  # A token enters the cache when the next one is drawn, so the last never does.
  growing = lm.grow_cache is not None and lm.map_cache_rows is not None
  ends = _stage_ends(t_max - 1, decoding.stages if growing else 1)
  cache = lm.init_cache(b, g, ends[0])
  start = 0
  compaction = None
  if growing and decoding.compact:
    compaction = find_compaction((b, g), lm.map_prefix_rows is not None)
  for stage, end in enumerate(ends):
    if stage:
      cache = lm.grow_cache(cache, end - start)
    # A branch per size: the smallest with room for all unfinished rows runs.
    sizes = compaction.sizes(stage, end - start) if compaction else [g]
    branches = [
      functools.partial(_decode_few, setup, compaction, size, (start, end))
      for size in sizes
    ]
    # Sizes descend, so the index is the number of smaller sizes that suffice.
    alive = compaction.most_alive(samples.done) if compaction else g
    branch = sum(alive <= size for size in sizes[1:])
    if len(sizes) > 1:  # the last branch skips the stage once all are done
      branches.append(lambda samples, cache: (samples, cache))
      branch = jnp.where(alive == 0, len(sizes), branch)
    samples, cache = jax.lax.switch(branch, branches, samples, cache)
    start = end
  return samples
