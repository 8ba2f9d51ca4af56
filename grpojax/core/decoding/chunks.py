"""Decoding in chunks, between which environments of the host answer.

    begin -> decode -> (environments) -> feed -> decode -> ... -> finish

A chunk draws tokens of the rows that are at a turn; those whose turn has ended
wait. Then each row's tokens are moved to the end of the cache's slots
(`LM.align_cache_rows`), so that all rows write to one slot again, whatever
their lengths; no token is computed twice. Observations are read by one pass of
all their tokens. As everywhere, token t of a sample draws from the sample's own
key and t: the size of a chunk changes no sample.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt, UInt32

from grpojax.core import ends as ends_lib
from grpojax.core.arguments import Ids, read_ends
from grpojax.core.decoding import (
  Samples,
  Setup,
  constrain_samples,
  draw,
  extend,
  no_experts,
  no_samples,
  of_words,
  prefill,
  sample_keys,
  token_limits,
)
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.types import LM, Cache, Params, Prefix, Prompts, Rollout


@struct.dataclass
class Trajectories:
  """Trajectories as far as they are drawn; the host reads the small arrays.

  Attributes:
    prefix: Prefix of the prompts.
    keys: Key of each sample.
    limit: Number of tokens that each row may have, observations among them.
    samples: Their tokens; `finished` is the environment's to say.
    turns: `Rollout.turns`.
    turn: Number of each row's turn.
    waiting: True where the turn has ended, and the environment is to answer.
    cache: Keys and values of all tokens of a row but the last.
    prompts: The prompts.
    prompt_experts: Experts of their tokens, where those of all are recorded.
    slots: Tokens that a row of the cache has room for.
  """

  prefix: Prefix
  keys: Key[Array, "B G"]
  limit: Int[Array, "B G"]
  samples: Samples
  turns: Int[Array, "B G T"]
  turn: Int[Array, "B G"]
  waiting: Bool[Array, "B G"]
  cache: Cache
  prompts: Prompts
  prompt_experts: Integer[Array, "B P X"] | None
  slots: int = struct.field(pytree_node=False)


def episode_seeds(
  key: Key[Array, ""],
  first_prompt: Int[Array, ""] | int = 0,
  *,
  shape: tuple[int, int],
) -> UInt[Array, "B G"]:
  """Returns a number of each sample for its environment's luck."""
  seed = lambda key: jax.random.bits(jax.random.fold_in(key, jnp.int32(-1)))
  return jax.vmap(jax.vmap(seed))(sample_keys(key, shape, first_prompt))


def begin(
  lm: LM,
  params: Params,
  prompts: Prompts,
  key: Array,
  first_prompt: Int[Array, ""] | int = 0,
  *,
  group_size: int,
  max_new_tokens: int,
  eos_ids: Ids,
  pad_id: int,
  slots: int,
  sampling: Sampling = Sampling(),
  record_experts: bool = False,
) -> Trajectories:
  """Computes the prompts, and begins a group of trajectories for each.

  Arguments are those of `rollout`; the cache begins with `slots` tokens a row.

  Raises:
    ValueError: the model's cache cannot be aligned.
  """
  if lm.align_cache_rows is None:
    raise ValueError(
      "rows of this model cannot wait for an environment of the host: its LM "
      "has no align_cache_rows; use a jittable environment"
    )
  b, g, t_max = prompts.prompt_ids.shape[0], group_size, max_new_tokens
  longest = prompts.prompt_ids.shape[1] + t_max
  decoder, prepared = lm.prepared(params, longest=longest, **sampling.formats)
  limit = token_limits(prompts, jnp.full((b, g), t_max))
  keys = sample_keys(key, (b, g), first_prompt)
  samples = no_samples(limit, t_max, pad_id, read_ends(eos_ids))
  zero = jnp.zeros((b, g), jnp.int32)
  prefix, experts = prefill(decoder, prepared, prompts, record_experts)
  if record_experts:
    samples = samples._replace(experts=no_experts(experts, g, t_max))
  return Trajectories(
    prefix=prefix,
    keys=keys,
    limit=limit,
    samples=constrain_samples(samples),
    turns=jnp.full((b, g, t_max), -1, jnp.int32),
    turn=zero,
    waiting=zero != 0,
    cache=decoder.init_cache(b, g, slots),
    prompts=prompts,
    prompt_experts=experts,
    slots=slots,
  )


def _prepared(
  lm: LM, params: Params, rows: Trajectories, sampling: Sampling
) -> tuple[LM, Params]:
  longest = rows.prompts.prompt_ids.shape[1] + rows.turns.shape[-1]
  return lm.prepared(params, longest=longest, **sampling.formats)


def _setup(
  lm: LM,
  params: Params,
  rows: Trajectories,
  ends: ends_lib.Ends,
  sampling: Sampling,
) -> Setup:
  return Setup(
    lm=lm,
    params=params,
    prefix=rows.prefix,
    keys=rows.keys,
    limit=rows.limit,
    ends=ends_lib.on_device(ends),
    sampling=sampling,
  )


def _cached(rows: Trajectories) -> Int[Array, "B G"]:
  """Returns the tokens of each row that are in the cache, or are to be."""
  over = rows.samples.done
  return jnp.where(over, 0, jnp.maximum(rows.samples.length - 1, 0))


def _align(
  lm: LM, rows: Trajectories, ends: Int[Array, "B G"], slots: int
) -> Trajectories:
  index = jnp.max(_cached(rows))
  cache = lm.align_cache_rows(rows.cache, ends, index, slots)
  return rows.replace(cache=cache, slots=slots)


def _grow(lm: LM, rows: Trajectories, slots: int) -> Trajectories:
  """Gives rows that are aligned room for `slots` tokens."""
  if slots == rows.slots:
    return rows
  ends = jnp.broadcast_to(jnp.max(_cached(rows)), rows.turn.shape)
  return _align(lm, rows, ends, slots)


def decode(
  lm: LM,
  params: Params,
  rows: Trajectories,
  over: Bool[Array, "B G"],
  finished: Bool[Array, "B G"],
  *,
  tokens: int,
  slots: int,
  eos_ids: Ids,
  sampling: Sampling = Sampling(),
  turn_tokens: int = 0,
) -> Trajectories:
  """Draws up to `tokens` tokens of each row that is at a turn.

  Args:
    lm: Model.
    params: Its parameters.
    rows: Trajectories; those that wait go on waiting.
    over: True where the host ends the trajectory.
    finished: True where the environment says that it is done.
    tokens: Tokens of a chunk; it ends before where no row is at a turn.
    slots: Tokens that a row of the cache has room for from now on: as many as
      the longest row has, and `tokens` more.
    eos_ids: Ends of a turn, as of `rollout`.
    sampling: Distribution to draw from.
    turn_tokens: Tokens after which a turn ends without such an end; 0 is none.
  """
  lm, params = _prepared(lm, params, rows, sampling)
  rows = _grow(lm, rows, slots)
  start, samples = jnp.max(_cached(rows)), rows.samples
  rows = rows.replace(
    samples=samples._replace(
      finished=samples.finished | finished, done=samples.done | over
    ),
    waiting=rows.waiting & ~over,
  )
  setup = _setup(lm, params, rows, read_ends(eos_ids), sampling)

  def body(state):
    i, rows, ends = state
    alive = ~(rows.samples.done | rows.waiting)
    rows = _append(setup, rows, alive, turn_tokens)
    return i + 1, rows, jnp.where(alive, start + i + 1, ends)

  def goes_on(state):
    i, rows, _ = state
    return (i < tokens) & ~jnp.all(rows.samples.done | rows.waiting)

  first = jnp.int32(0), rows, jnp.broadcast_to(start, over.shape)
  _, rows, ends = jax.lax.while_loop(goes_on, body, first)
  return _align(lm, rows, ends, slots)


def _append(
  setup: Setup, rows: Trajectories, alive: Bool[Array, "B G"], turn_tokens: int
) -> Trajectories:
  """Draws the next token of the rows that are `alive`."""
  samples, t = rows.samples, rows.samples.length
  # The last token of each row goes through the model, but where a row begins:
  # its prompt predicts the first token.
  at = jnp.maximum(t - 1, 0)[..., None]
  last = jnp.take_along_axis(samples.ids, at, axis=-1)
  hidden, cache, experts = extend(
    setup, last, rows.cache, samples.experts is not None, positions=at
  )
  first = setup.prefix.last_hidden[:, None]
  hidden = jnp.where((t == 0)[..., None], first, hidden[:, :, 0])
  ids, logprobs = draw(setup, setup.keys, t, hidden)
  at_t = alive[..., None] & (jnp.arange(rows.turns.shape[-1]) == t[..., None])

  def put(old, new):
    return jnp.where(at_t, new[..., None], old)

  ends, state = ends_lib.advance(setup.ends, samples.stop_state, ids)
  if turn_tokens:
    own = jnp.sum(rows.turns == rows.turn[..., None], axis=-1)
    ends |= own + 1 >= turn_tokens
  ended, length = alive & ends, t + alive
  return rows.replace(
    samples=constrain_samples(
      samples._replace(
        ids=put(samples.ids, ids),
        logprobs=put(samples.logprobs, logprobs),
        length=length,
        done=samples.done | (alive & ~ended & (length >= setup.limit)),
        stop_state=ends_lib.within(state, alive, ended),
        experts=_record(samples.experts, experts, at, alive[..., None]),
      )
    ),
    turns=put(rows.turns, rows.turn),
    waiting=rows.waiting | ended,
    cache=cache,
  )


def _record(
  experts: UInt32[Array, "B G T W"] | None,
  new: UInt32[Array, "B G S W"] | None,
  at: Int[Array, "B G S"],
  real: Bool[Array, "B G S"],
) -> UInt32[Array, "B G T W"] | None:
  """Writes the experts of the real ones of the tokens at some positions."""
  if new is None:
    return None
  put = lambda x, new, at: x.at[at].set(new, mode="drop")
  at = jnp.where(real, at, experts.shape[2])
  return jax.vmap(jax.vmap(put))(experts, new, at)


def feed(
  lm: LM,
  params: Params,
  rows: Trajectories,
  ids: Int[Array, "B G S"],
  lengths: Int[Array, "B G"],
  complete: Bool[Array, "B G"],
  *,
  slots: int,
  sampling: Sampling = Sampling(),
) -> Trajectories:
  """Has rows that wait read observations, or a part of them.

  Args:
    lm: Model.
    params: Its parameters.
    rows: Trajectories.
    ids: Next tokens of the observations.
    lengths: Number of them, 0 where nothing is read.
    complete: True where this is all, and the next turn begins.
    slots: As of `decode`, for S tokens more.
    sampling: That of `decode`.
  """
  lm, params = _prepared(lm, params, rows, sampling)
  rows = _grow(lm, rows, slots)
  start = jnp.max(_cached(rows))
  samples, size = rows.samples, ids.shape[-1]
  # The turn's last token is not in the cache yet, and the last one of what is
  # read will not be: it predicts the first token of the next turn.
  at = jnp.maximum(samples.length - 1, 0)[..., None]
  last = jnp.take_along_axis(samples.ids, at, axis=-1)
  setup = _setup(lm, params, rows, ends_lib.Ends(()), sampling)
  positions = at + jnp.arange(size)
  _, cache, experts = extend(
    setup,
    jnp.concatenate([last, ids[..., :-1]], axis=-1),
    rows.cache,
    samples.experts is not None,
    positions=positions,
  )
  of_row = jnp.arange(rows.turns.shape[-1]) - samples.length[..., None]
  read = (of_row >= 0) & (of_row < lengths[..., None])
  new = jnp.take_along_axis(ids, jnp.clip(of_row, 0, size - 1), axis=-1)
  rows = rows.replace(
    samples=samples._replace(
      ids=jnp.where(read, new, samples.ids),
      length=samples.length + lengths,
      experts=_record(
        samples.experts,
        experts,
        positions,
        jnp.arange(size) < lengths[..., None],
      ),
    ),
    turn=rows.turn + complete,
    waiting=rows.waiting & ~complete,
    cache=cache,
  )
  return _align(lm, rows, start + lengths, slots)


def finish(
  rows: Trajectories,
  finished: Bool[Array, "B G"],
  rewards: Float[Array, "B G K"],
) -> Rollout:
  """Returns the trajectories, with the environment's rewards of the turns."""
  samples, t_max = rows.samples, rows.turns.shape[-1]
  return Rollout(
    prompt_ids=rows.prompts.prompt_ids,
    prompt_mask=rows.prompts.prompt_mask,
    completion_ids=samples.ids,
    completion_mask=jnp.arange(t_max) < samples.length[..., None],
    logprobs=samples.logprobs,
    finished=samples.finished | finished,
    turns=rows.turns,
    turn_rewards=rewards,
    experts=of_words(samples.experts, rows.prompt_experts),
    prompt_experts=rows.prompt_experts,
  )
