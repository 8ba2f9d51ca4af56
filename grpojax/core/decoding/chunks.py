"""Decoding in chunks, with answers of host environments in between.

    begin -> decode -> (environments) -> feed -> decode -> ... -> finish

A chunk draws tokens of rows in a turn; rows whose turn has ended wait. Then the
cached tokens of each row are moved to end at the same slot
(`LM.align_cache_rows`): rows of different lengths go on writing to a common
slot, and no token is computed twice. A forward pass reads observations.
Token t of a sample is drawn from its key and t, so chunks change no sample.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt, UInt32

from grpojax.core import decoding as loops
from grpojax.core import ends as ends_lib
from grpojax.core.arguments import Ids, read_ends
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.types import LM, Cache, Params, Prefix, Prompts, Rollout


@struct.dataclass
class Trajectories:
  """Trajectories so far; the host reads the small arrays."""

  prefix: Prefix
  keys: Key[Array, "B G"]
  limit: Int[Array, "B G"]  # maximum tokens of each row, with observations
  samples: loops.Samples  # `finished` is set by the environment, not by an EOS
  turns: Int[Array, "B G T"]  # as `Rollout.turns`
  turn: Int[Array, "B G"]  # number of each row's turn
  waiting: Bool[Array, "B G"]  # the turn has ended and has no answer yet
  cache: Cache  # keys and values of all tokens of a row but the last
  prompts: Prompts
  prompt_experts: Integer[Array, "B P X"] | None
  slots: int = struct.field(pytree_node=False)  # tokens per row of the cache


def episode_seeds(
  key: Key[Array, ""],
  first_prompt: Int[Array, ""] | int = 0,
  *,
  shape: tuple[int, int],
) -> UInt[Array, "B G"]:
  """Returns the random seed of each sample's environment."""
  seed = lambda key: jax.random.bits(jax.random.fold_in(key, jnp.int32(-1)))
  return jax.vmap(jax.vmap(seed))(loops.sample_keys(key, shape, first_prompt))


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
  """Runs the prompts and begins a group of trajectories for each.

  Arguments are as in `rollout`; `slots` is the first size of the cache.
  ValueError if the model's cache cannot be aligned.
  """
  if lm.align_cache_rows is None:
    raise ValueError(
      "this model cannot wait for an environment on the host (no "
      "LM.align_cache_rows): use a jittable environment"
    )
  b = prompts.prompt_ids.shape[0]
  g = group_size
  t_max = max_new_tokens
  longest = prompts.prompt_ids.shape[1] + t_max
  decoder, prepared = lm.prepared(params, longest=longest, **sampling.formats)
  limit = loops.token_limits(prompts, jnp.full((b, g), t_max))
  keys = loops.sample_keys(key, (b, g), first_prompt)
  prefix, experts = loops.prefill(decoder, prepared, prompts, record_experts)
  ends = read_ends(eos_ids)
  samples = loops.no_samples(limit, t_max, pad_id, ends, experts)
  zero = jnp.zeros((b, g), jnp.int32)
  return Trajectories(
    prefix=prefix,
    keys=keys,
    limit=limit,
    samples=loops.constrain_samples(samples),
    turns=jnp.full((b, g, t_max), -1, jnp.int32),
    turn=zero,
    waiting=zero != 0,
    cache=decoder.init_cache(b, g, slots),
    prompts=prompts,
    prompt_experts=experts,
    slots=slots,
  )


def _prepare(
  lm: LM,
  params: Params,
  rows: Trajectories,
  ends: ends_lib.Ends,
  sampling: Sampling,
  slots: int,
) -> tuple[loops.Setup, Trajectories]:
  """Returns the loop's inputs, and the rows in a cache of `slots` tokens."""
  longest = rows.prompts.prompt_ids.shape[1] + rows.turns.shape[-1]
  lm, params = lm.prepared(params, longest=longest, **sampling.formats)
  ends = ends_lib.on_device(ends)
  setup = loops.Setup(
    lm, params, rows.prefix, rows.keys, rows.limit, ends, sampling
  )
  # Between calls all rows end at a common slot, so only the size changes here.
  if slots != rows.slots:
    common = jnp.broadcast_to(jnp.max(_cached(rows)), rows.turn.shape)
    rows = _align(lm, rows, common, slots)
  return setup, rows


def _cached(rows: Trajectories) -> Int[Array, "B G"]:
  """Returns the number of cached tokens of each row; 0 if it is done."""
  over = rows.samples.done
  return jnp.where(over, 0, jnp.maximum(rows.samples.length - 1, 0))


def _align(
  lm: LM, rows: Trajectories, ends: Int[Array, "B G"], slots: int
) -> Trajectories:
  """Moves rows whose tokens end at slots `ends` to a common end."""
  index = jnp.max(_cached(rows))
  cache = lm.align_cache_rows(rows.cache, ends, index, slots)
  return rows.replace(cache=cache, slots=slots)


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
  """Draws up to `tokens` tokens of each row in a turn.

  It ends early once all rows wait or are done. `over` marks trajectories to
  end, `finished` trajectories whose environment is done. `slots` is the new
  size of the cache: at least the longest row and `tokens` more. A turn ends at
  `eos_ids` (see `rollout`) or after `turn_tokens` tokens (0 for no limit).
  """
  setup, rows = _prepare(lm, params, rows, read_ends(eos_ids), sampling, slots)
  start = jnp.max(_cached(rows))  # the slot that all rows write next
  samples = rows.samples
  # Apply the decisions of the environments since the last chunk.
  rows = rows.replace(
    samples=samples._replace(
      finished=samples.finished | finished, done=samples.done | over
    ),
    waiting=rows.waiting & ~over,
  )

  def body(state):
    i, rows, ends = state
    alive = ~(rows.samples.done | rows.waiting)
    rows = _append(setup, rows, alive, turn_tokens)
    # The slot after each row's last token: waiting rows keep theirs.
    return i + 1, rows, jnp.where(alive, start + i + 1, ends)

  def goes_on(state):
    i, rows, _ = state
    return (i < tokens) & ~jnp.all(rows.samples.done | rows.waiting)

  first = jnp.int32(0), rows, jnp.broadcast_to(start, over.shape)
  _, rows, ends = jax.lax.while_loop(goes_on, body, first)
  return _align(setup.lm, rows, ends, slots)


def _append(
  setup: loops.Setup,
  rows: Trajectories,
  alive: Bool[Array, "B G"],
  turn_tokens: int,
) -> Trajectories:
  """Draws the next token of `alive` rows."""
  samples = rows.samples
  t = samples.length
  # The first token is predicted by the prompt, others by the row's last token.
  at = jnp.maximum(t - 1, 0)[..., None]
  last = jnp.take_along_axis(samples.ids, at, axis=-1)
  # Without a token yet, this writes a padding id at position 0. The first token
  # has position 0, too, and tokens read no more slots than their position.
  hidden, cache, experts = loops.extend(
    setup, last, rows.cache, samples.experts is not None, positions=at
  )
  first = setup.prefix.last_hidden[:, None]
  hidden = jnp.where((t == 0)[..., None], first, hidden[:, :, 0])
  ids, logprobs = loops.draw(setup, setup.keys, t, hidden)
  # [B, G, T]: True at the new token of each row, False in rows that wait.
  at_t = alive[..., None] & (jnp.arange(rows.turns.shape[-1]) == t[..., None])

  def put(old, new):
    return jnp.where(at_t, new[..., None], old)

  ends, state = ends_lib.advance(setup.ends, samples.stop_state, ids)
  if turn_tokens:
    # `turns` does not have the new token yet.
    in_turn = jnp.sum(rows.turns == rows.turn[..., None], axis=-1)
    ends |= in_turn + 1 >= turn_tokens
  ended = alive & ends
  length = t + alive
  return rows.replace(
    samples=loops.constrain_samples(
      samples._replace(
        ids=put(samples.ids, ids),
        logprobs=put(samples.logprobs, logprobs),
        length=length,
        # A turn that ends at the limit waits for its reward.
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
  """Writes the experts of real tokens to positions `at`, if recorded."""
  if new is None:
    return None
  put = lambda x, new, at: x.at[at].set(new, mode="drop")
  # T is out of range, and such writes are dropped.
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
  """Feeds waiting rows the next tokens of their observations.

  A row reads the first `lengths` of its `ids`. Rows that are `complete` begin
  their next turn. `slots` is as in `decode`.
  """
  ends = ends_lib.Ends(())  # not read
  setup, rows = _prepare(lm, params, rows, ends, sampling, slots)
  start = jnp.max(_cached(rows))
  samples = rows.samples
  size = ids.shape[-1]
  # The turn's last token enters the cache now. The observation's last token
  # enters it later, when it predicts the first token of the next turn.
  at = jnp.maximum(samples.length - 1, 0)[..., None]
  last = jnp.take_along_axis(samples.ids, at, axis=-1)
  positions = at + jnp.arange(size)
  _, cache, experts = loops.extend(
    setup,
    jnp.concatenate([last, ids[..., :-1]], axis=-1),
    rows.cache,
    samples.experts is not None,
    positions=positions,
  )
  # The cache gets the turn's last token and all new ones but the last: as many
  # real tokens as the row.
  real = jnp.arange(size) < lengths[..., None]
  # Place in the observation of each token of the row, [B, G, T].
  index = jnp.arange(rows.turns.shape[-1]) - samples.length[..., None]
  read = (index >= 0) & (index < lengths[..., None])
  new = jnp.take_along_axis(ids, jnp.clip(index, 0, size - 1), axis=-1)
  rows = rows.replace(
    samples=samples._replace(
      ids=jnp.where(read, new, samples.ids),
      length=samples.length + lengths,
      experts=_record(samples.experts, experts, positions, real),
    ),
    turn=rows.turn + complete,
    waiting=rows.waiting & ~complete,
    cache=cache,
  )
  # All rows wrote S slots from `start` on; the first `lengths` are real.
  return _align(setup.lm, rows, start + lengths, slots)


def finish(
  rows: Trajectories,
  finished: Bool[Array, "B G"],
  rewards: Float[Array, "B G K"],
) -> Rollout:
  """Returns the rollout, with the rewards that environments gave to turns."""
  samples = rows.samples
  t_max = rows.turns.shape[-1]
  return Rollout(
    prompt_ids=rows.prompts.prompt_ids,
    prompt_mask=rows.prompts.prompt_mask,
    completion_ids=samples.ids,
    completion_mask=jnp.arange(t_max) < samples.length[..., None],
    logprobs=samples.logprobs,
    finished=samples.finished | finished,
    turns=rows.turns,
    turn_rewards=rewards,
    experts=loops.unpack_experts(samples.experts, rows.prompt_experts),
    prompt_experts=rows.prompt_experts,
  )
