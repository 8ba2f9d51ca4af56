"""The token loop of rollouts: each pass draws the next token of every row.

Rows have their own lengths: a row's last token enters the cache at its own
slot and predicts the row's next token. Token t of a sample is drawn from the
sample's own key and t alone, so neither the other rows nor the shape of the
loop change a sample. `read_last` and `append` are the two halves of a pass:

    rollout    `token_loop`, without kernels in shrinking batches (`compaction`)
    turns      `environment.advance` in the loop, or chunks of the loop with
               answers of the host in between (`chunks`)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import (
  Array,
  Bool,
  Float,
  Int,
  Key,
  PyTree,
  Shaped,
  UInt32,
)

from grpojax.core import ends as ends_lib
from grpojax.core import environment as environment_lib
from grpojax.core.decoding import experts as experts_lib
from grpojax.core.decoding.sampling import (
  Sampling,
  sample,
  sample_parts,
  uniform,
)
from grpojax.core.meshes import constrain, runs_kernels
from grpojax.core.random_keys import random_key
from grpojax.core.types import LM, Cache, ExtendOutput, Params, Prefix, Prompts

BETWEEN_CHECKS = 16
"""Tokens between two questions whether all rows are done, on accelerators: the
answer costs a transfer to the host on GPUs, a collective on a slice of TPUs."""


class Samples(NamedTuple):
  """Completions so far; `experts` are packed (see `decoding.experts`)."""

  ids: Int[Array, "B G T"]
  logprobs: Float[Array, "B G T"]
  length: Int[Array, "B G"]
  finished: Bool[Array, "B G"]
  done: Bool[Array, "B G"]
  episodes: environment_lib.Episodes | None = None
  experts: UInt32[Array, "B G T W"] | None = None
  stop_state: Int[Array, "B G"] | None = None


class Setup(NamedTuple):
  """Constant inputs of the token loop."""

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


def no_samples(
  limit: Int[Array, "B G"],
  t_max: int,
  pad_id: int,
  ends: ends_lib.Ends,
  prefix: Prefix,
) -> Samples:
  """Returns empty samples of at most `t_max` tokens each."""
  return Samples(
    ids=jnp.full((*limit.shape, t_max), pad_id, jnp.int32),
    logprobs=jnp.zeros((*limit.shape, t_max), jnp.float32),
    length=jnp.zeros(limit.shape, jnp.int32),
    finished=jnp.zeros(limit.shape, bool),
    # The batch's padding is done before its first token.
    done=limit <= 0,
    experts=experts_lib.empty(prefix, (*limit.shape, t_max)),
    stop_state=ends_lib.first_state(ends, limit),
  )


def draw(
  setup: Setup,
  keys: Key[Array, "B G"],
  t: Int[Array, "B G"],
  hidden: Float[Array, "B G D"],
) -> tuple[Int[Array, "B G"], Float[Array, "B G"]]:
  """Draws token t of each sample; returns ids and log-probabilities."""
  keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, t)
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


def first_hidden(setup: Setup) -> Float[Array, "B G D"]:
  """Returns the prompts' last states, which predict the first tokens."""
  last = setup.prefix.last_hidden[:, None]
  return jnp.broadcast_to(last, (*setup.limit.shape, last.shape[-1]))


def read(
  setup: Setup,
  samples: Samples,
  cache: Cache,
  ids: Int[Array, "B G S"],
  positions: Int[Array, "B G S"],
  real: Bool[Array, "B G S"],
) -> tuple[Float[Array, "B G S D"], Samples, Cache]:
  """Runs tokens through the model, and records any experts of `real` ones.

  Rows at position -1 read and write nothing, and their states are not used.
  """
  output = setup.lm.extend(
    setup.params, setup.prefix, ids, cache, positions=positions
  )
  hidden, cache, experts = ExtendOutput(*output)
  experts = experts_lib.write(samples.experts, experts, positions, real)
  return hidden, samples._replace(experts=experts), cache


def read_last(
  setup: Setup, samples: Samples, cache: Cache, alive: Bool[Array, "B G"]
) -> tuple[Float[Array, "B G D"], Samples, Cache]:
  """Runs the last token of each `alive` row; returns the states after it."""
  at = jnp.maximum(samples.length - 1, 0)[..., None]
  last = jnp.take_along_axis(samples.ids, at, axis=-1)
  real = alive[..., None]
  at = jnp.where(real, at, -1)
  hidden, samples, cache = read(setup, samples, cache, last, at, real)
  return hidden[:, :, 0], samples, cache


def at_end(
  old: Shaped[Array, "B G T"],
  new: Shaped[Array, "B G"],
  length: Int[Array, "B G"],
  alive: Bool[Array, "B G"],
) -> Array:
  """Writes `new` [B, G] at the last token of the `alive` rows of `old`."""
  is_last = jnp.arange(old.shape[-1])[None, None] == length[..., None] - 1
  return jnp.where(is_last & alive[..., None], new[..., None], old)


def append(
  setup: Setup,
  samples: Samples,
  hidden: Float[Array, "B G D"],
  alive: Bool[Array, "B G"],
  is_last: Bool[Array, "B G"] | bool = False,
) -> tuple[Samples, Bool[Array, "B G"], Bool[Array, "B G"]]:
  """Draws the next token of `alive` rows, or copies an observation's.

  Returns the samples, and masks of the rows with a drawn token and of those
  whose token ends a completion or turn; `is_last` tokens end it in any case.
  """
  episodes = samples.episodes
  ids, logprobs = draw(setup, setup.keys, samples.length, hidden)
  # Rows with unread tokens of an observation take the next of these instead.
  drawn = alive
  if episodes is not None:
    drawn = alive & ~episodes.forced
    ids = episodes.next_ids(ids)
    logprobs = jnp.where(drawn, logprobs, 0.0)
  is_end, state = ends_lib.advance(setup.ends, samples.stop_state, ids)
  ended = drawn & (is_end | is_last)
  length = samples.length + alive
  samples = samples._replace(
    ids=at_end(samples.ids, ids, length, alive),
    logprobs=at_end(samples.logprobs, logprobs, length, alive),
    length=length,
    # Observations and ends reset the state: a stop string lies within a turn.
    stop_state=ends_lib.within(state, drawn, ended),
  )
  return samples, drawn, ended


def _next_token(
  setup: Setup, samples: Samples, hidden: Float[Array, "B G D"]
) -> Samples:
  """Appends a token to each unfinished row, and steps its environment."""
  alive = ~samples.done
  before = samples.episodes
  samples, drawn, ended = append(setup, samples, hidden, alive)
  length = samples.length
  over = ended
  if before is not None:
    # Turn -1 marks tokens of observations.
    turn = jnp.where(drawn, before.turn, -1)
    episodes = before._replace(
      read=before.read + (alive & ~drawn),
      turns=at_end(before.turns, turn, length, alive),
    )
    # From here on `ended` marks trajectories that the environment has ended.
    episodes, ended, over = environment_lib.advance(
      setup.environment,
      episodes,
      samples.ids,
      setup.keys,
      length,
      setup.limit,
      ended,
    )
    samples = samples._replace(episodes=episodes)
  return samples._replace(
    finished=samples.finished | ended,
    done=samples.done | over | (length >= setup.limit),
  )


def first_token(setup: Setup, samples: Samples) -> Samples:
  """Draws the first token of each sample, which the prompt predicts."""
  return _next_token(setup, samples, first_hidden(setup))


def token_loop(
  setup: Setup,
  samples: Samples,
  cache: Cache,
  tokens: int,
  *,
  goes_on: Any = lambda samples: ~jnp.all(samples.done),
  between_checks: int = 1,
) -> tuple[Samples, Cache]:
  """Draws at most `tokens` tokens of each unfinished row.

  The loop ends if `goes_on(samples)`, asked every `between_checks` tokens, is
  False. `tokens` is rounded up to a multiple of `between_checks`; no row gets
  more than its limit.
  """

  def token(_, state):
    samples, cache = state
    alive = ~samples.done
    hidden, samples, cache = read_last(setup, samples, cache, alive)
    return _next_token(setup, samples, hidden), cache

  def body(state):
    i, *rest = state
    if between_checks == 1:
      return i + 1, *token(i, rest)
    return i + 1, *jax.lax.fori_loop(0, between_checks, token, tuple(rest))

  def condition(state):
    i, samples, _ = state
    return (i < -(-tokens // between_checks)) & goes_on(samples)

  first = jnp.zeros((), jnp.int32), samples, cache
  return jax.lax.while_loop(condition, body, first)[1:]
