"""Decoding in chunks, with answers of host environments in between.

    begin -> decode -> (environments) -> feed -> decode -> ... -> finish

A chunk draws tokens of rows in a turn; rows whose turn has ended wait. A
forward pass reads observations. Token t of a sample is drawn from its key and
t, so chunks change no sample.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from grpojax.core import decoding as loops
from grpojax.core import ends as ends_lib
from grpojax.core.arguments import Ids, read_ends
from grpojax.core.decoding import experts
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


def episode_seeds(
  key: Key[Array, ""],
  first_prompt: Int[Array, ""] | int = 0,
  *,
  shape: tuple[int, int],
) -> UInt[Array, "B G"]:
  """Returns the random seed of each sample's environment."""
  seed = lambda key: jax.random.bits(jax.random.fold_in(key, jnp.int32(-1)))
  return jax.vmap(jax.vmap(seed))(loops.sample_keys(key, shape, first_prompt))


def _setup(
  lm: LM,
  params: Params,
  rows: Trajectories,
  ends: ends_lib.Ends,
  sampling: Sampling,
) -> loops.Setup:
  """Returns the inputs of the token loop."""
  longest = rows.prompts.prompt_ids.shape[1] + rows.turns.shape[-1]
  lm, params = lm.prepared(params, longest=longest, **sampling.formats)
  ends = ends_lib.on_device(ends)
  return loops.Setup(
    lm, params, rows.prefix, rows.keys, rows.limit, ends, sampling
  )


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
  sampling: Sampling = Sampling(),
  turn_tokens: int = 0,
) -> Trajectories:
  """Runs the prompts and draws the first token of a group for each.

  Arguments are as in `rollout` and `decode`.
  """
  b = prompts.prompt_ids.shape[0]
  g = group_size
  t_max = max_new_tokens
  longest = prompts.prompt_ids.shape[1] + t_max
  decoder, prepared = lm.prepared(params, longest=longest, **sampling.formats)
  limit = loops.token_limits(prompts, jnp.full((b, g), t_max))
  prefix = decoder.prefill(prepared, prompts.prompt_ids, prompts.prompt_mask)
  ends = read_ends(eos_ids)
  samples = loops.no_samples(limit, t_max, pad_id, ends, prefix)
  zero = jnp.zeros((b, g), jnp.int32)
  rows = Trajectories(
    prefix=prefix,
    keys=loops.sample_keys(key, (b, g), first_prompt),
    limit=limit,
    samples=loops.constrain_samples(samples),
    turns=jnp.full((b, g, t_max), -1, jnp.int32),
    turn=zero,
    waiting=zero != 0,
    cache=decoder.init_cache(b, g, t_max),
    prompts=prompts,
  )
  setup = _setup(lm, params, rows, ends, sampling)
  first = loops.first_hidden(setup)
  return _append(setup, rows, first, ~samples.done, turn_tokens)


def decode(
  lm: LM,
  params: Params,
  rows: Trajectories,
  over: Bool[Array, "B G"],
  finished: Bool[Array, "B G"],
  *,
  tokens: int,
  eos_ids: Ids,
  sampling: Sampling = Sampling(),
  turn_tokens: int = 0,
) -> Trajectories:
  """Draws up to `tokens` tokens of each row in a turn.

  It ends early once all rows wait or are done. `over` marks trajectories to
  end, `finished` trajectories whose environment is done. A turn ends at
  `eos_ids` (see `rollout`) or after `turn_tokens` tokens (0 for no limit).
  """
  setup = _setup(lm, params, rows, read_ends(eos_ids), sampling)
  # Apply the decisions of the environments since the last chunk.
  samples = rows.samples
  samples = samples._replace(
    finished=samples.finished | finished, done=samples.done | over
  )
  rows = rows.replace(samples=samples, waiting=rows.waiting & ~over)

  def in_turn(rows):
    return ~(rows.samples.done | rows.waiting)

  def body(state):
    i, rows = state
    alive = in_turn(rows)
    hidden, samples, cache = loops.read_last(
      setup, rows.samples, rows.cache, alive
    )
    rows = rows.replace(samples=samples, cache=cache)
    return i + 1, _append(setup, rows, hidden, alive, turn_tokens)

  def goes_on(state):
    i, rows = state
    return (i < tokens) & jnp.any(in_turn(rows))

  return jax.lax.while_loop(goes_on, body, (jnp.int32(0), rows))[1]


def _append(
  setup: loops.Setup,
  rows: Trajectories,
  hidden: Float[Array, "B G D"],
  alive: Bool[Array, "B G"],
  turn_tokens: int,
) -> Trajectories:
  """Draws the next token of `alive` rows."""
  is_last = False
  if turn_tokens:
    # `turns` does not have the new token yet.
    in_turn = jnp.sum(rows.turns == rows.turn[..., None], axis=-1)
    is_last = in_turn + 1 >= turn_tokens
  samples, _, ended = loops.append(setup, rows.samples, hidden, alive, is_last)
  length = samples.length
  # A turn that ends at the limit waits for its reward.
  cut = alive & ~ended & (length >= setup.limit)
  return rows.replace(
    samples=loops.constrain_samples(samples._replace(done=samples.done | cut)),
    turns=loops.at_end(rows.turns, rows.turn, length, alive),
    waiting=rows.waiting | ended,
  )


def feed(
  lm: LM,
  params: Params,
  rows: Trajectories,
  ids: Int[Array, "B G S"],
  lengths: Int[Array, "B G"],
  complete: Bool[Array, "B G"],
  *,
  sampling: Sampling = Sampling(),
) -> Trajectories:
  """Feeds waiting rows the next tokens of their observations.

  A row reads the first `lengths` of its `ids`. Rows that are `complete` begin
  their next turn.
  """
  ends = ends_lib.Ends(())  # not read
  setup = _setup(lm, params, rows, ends, sampling)
  samples = rows.samples
  size = ids.shape[-1]
  # The turn's last token enters the cache now. The observation's last token
  # enters it later, when it predicts the first token of the next turn.
  at = jnp.maximum(samples.length - 1, 0)[..., None]
  last = jnp.take_along_axis(samples.ids, at, axis=-1)
  real = jnp.arange(size) < lengths[..., None]
  positions = jnp.where(real, at + jnp.arange(size), -1)
  tokens = jnp.concatenate([last, ids[..., :-1]], axis=-1)
  _, samples, cache = loops.read(
    setup, samples, rows.cache, tokens, positions, real
  )
  # Place in the observation of each token of the row, [B, G, T].
  index = jnp.arange(rows.turns.shape[-1]) - samples.length[..., None]
  is_read = (index >= 0) & (index < lengths[..., None])
  new = jnp.take_along_axis(ids, jnp.clip(index, 0, size - 1), axis=-1)
  return rows.replace(
    samples=samples._replace(
      ids=jnp.where(is_read, new, samples.ids),
      length=samples.length + lengths,
    ),
    turn=rows.turn + complete,
    waiting=rows.waiting & ~complete,
    cache=cache,
  )


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
    experts=experts.unpack(samples.experts, rows.prefix),
    prompt_experts=rows.prefix.experts,
  )
