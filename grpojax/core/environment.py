"""Environments inside the decoding loop: trajectories as one XLA program.

    prompt   p p p
    drawn    a a E . . b E . . c E       E ends a turn
    forced         o o     o o           observations
    turns    0 0 0 - - 1 1 - - 2 2

At the end of a turn the environment is stepped, and its answer becomes the next
tokens of the row. Each row gets a token per iteration of the loop, drawn or
observed, so `Decoding` options work as without an environment. For environments
that cannot be jitted see `core.turns.trajectories`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from grpojax.core.random_keys import seed_key
from grpojax.core.types import Rollout


class Observation(NamedTuple):
  """Answer of an environment to a turn.

  Attributes:
    ids: Next token ids of the row, padded after the first `length`.
    length: Number of tokens, 0 to O.
    reward: Reward of the turn; it becomes nan if `length` or an id is invalid.
    done: True if the trajectory ends here; `ids` are then ignored.
  """

  ids: Int[Array, "O"]
  length: Int[Array, ""] | int
  reward: Float[Array, ""] | float
  done: Bool[Array, ""] | bool


class Environment(NamedTuple):
  """A jittable environment, as functions of one trajectory.

  Attributes:
    reset: `(target, key) -> state`, a pytree of arrays. `target` is the
      prompt's entry of `Prompts.targets`, `key` a random key of the sample.
    step: `(state, ids [T], length, key) -> (state, Observation)`, where `ids`
      begins with the `length` tokens of the turn, its end token included. It
      must be pure: it runs for all rows whenever a turn ends in any row.
    observation_length: O, tokens of an observation's `ids`.
    max_turns: K, the maximum number of turns.
  """

  reset: Callable[..., Any]
  step: Callable[..., tuple[Any, Observation]]
  observation_length: int
  max_turns: int


class Episodes(NamedTuple):
  """State of all trajectories between two iterations of the decoding loop."""

  state: PyTree  # states of the environments, arrays [B, G, ...]
  observation: Int[Array, "B G O"]  # answer to the last turn
  length: Int[Array, "B G"]  # tokens of the observation
  read: Int[Array, "B G"]  # tokens of the observation already in the row
  begin: Int[Array, "B G"]  # index in the row of the turn's first token
  turn: Int[Array, "B G"]
  turns: Int[Array, "B G T"]  # `Rollout.turns`
  rewards: Float[Array, "B G K"]  # `Rollout.turn_rewards`

  @property
  def forced(self) -> Bool[Array, "B G"]:
    """True for rows whose next token is part of an observation."""
    return self.read < self.length

  def next_ids(self, drawn: Int[Array, "B G"]) -> Int[Array, "B G"]:
    """Returns the next token of each row, drawn or forced."""
    # Rows with no observation left take `drawn`, but need a valid index.
    at = jnp.minimum(self.read, self.observation.shape[-1] - 1)[..., None]
    forced = jnp.take_along_axis(self.observation, at, axis=-1)[..., 0]
    return jnp.where(self.forced, forced, drawn)


def _keys(keys: Key[Array, "B G"], turn: Array) -> Key[Array, "B G"]:
  """Derives a turn's keys by folding in -1 - turn; tokens fold in t >= 0."""
  return jax.vmap(jax.vmap(jax.random.fold_in))(
    keys, jnp.broadcast_to(-1 - turn, keys.shape)
  )


def _struct(tree: PyTree) -> PyTree:
  """Returns shapes and dtypes, without JAX's weak types."""
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def checked(
  environment: Environment, targets: Any, prompts: int, length: int, vocab: int
) -> Environment:
  """Returns an environment whose invalid observations have the reward nan.

  B = `prompts`, T = `length`. ValueError for invalid sizes, and for targets, a
  state or an answer of wrong shapes or types.
  """
  for name in ("observation_length", "max_turns"):
    size = getattr(environment, name)
    if not isinstance(size, int) or size < 1:
      raise ValueError(f"Environment.{name}={size} must be an int, at least 1")
  shapes = [jnp.shape(x) for x in jax.tree.leaves(targets)]
  if any(shape[:1] != (prompts,) for shape in shapes):
    raise ValueError(
      f"targets must be arrays [B, ...] for B = {prompts} prompts, not of "
      f"shapes {shapes}"
    )
  key = jax.eval_shape(lambda: seed_key(0))

  def reset(target, key):
    return jax.tree.map(jnp.asarray, environment.reset(target, key))

  # Check the functions on the shapes of a single prompt, without running them.
  first = jax.eval_shape(
    lambda t, key: reset(jax.tree.map(lambda x: x[0], t), key), targets, key
  )
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  answer = jax.eval_shape(environment.step, first, array(length), array(), key)
  size = environment.observation_length
  _check_answer(answer, first, size)

  def step(state, ids, length, key):
    new, seen = environment.step(state, ids, length, key)
    # The loop carries the state, so its dtypes must stay those of `reset`.
    new = jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), new, state)
    real = jnp.arange(size) < seen.length
    unknown = real & ((seen.ids < 0) | (seen.ids >= vocab))
    # A compiled loop cannot raise an error: nan leaves the sample out.
    valid = (seen.length >= 0) & (seen.length <= size) & ~jnp.any(unknown)
    return new, Observation(
      ids=jnp.asarray(seen.ids, jnp.int32),
      length=jnp.clip(seen.length, 0, size).astype(jnp.int32),
      reward=jnp.where(valid, jnp.asarray(seen.reward, jnp.float32), jnp.nan),
      done=jnp.asarray(seen.done),
    )

  return environment._replace(reset=reset, step=step)


def _check_answer(answer: Any, first: PyTree, size: int) -> None:
  """Raises ValueError for wrong results of `step`; `first` is reset's state."""
  pair = isinstance(answer, tuple) and len(answer) == 2
  if not pair or not isinstance(answer[1], Observation):
    raise ValueError(
      "an environment's step must return (state, Observation(...)), not "
      f"{type(answer).__name__} {answer}"
    )
  state, seen = answer
  if _struct(state) != _struct(first):
    raise ValueError(
      "an environment's step must return a state like reset's: "
      f"{_struct(first)}, not {_struct(state)}"
    )
  kinds = {"integer": "iu", "real": "biuf", "boolean": "b"}  # of numpy dtypes
  types = {"ids": "integer", "length": "integer"}
  types |= {"reward": "real", "done": "boolean"}
  for name, kind in types.items():
    value = getattr(seen, name)
    shape = (size,) if name == "ids" else ()
    fits = getattr(value, "shape", None) == shape
    if not fits or jnp.dtype(value.dtype).kind not in kinds[kind]:
      raise ValueError(
        f"an Observation's {name} must be {kind} of shape {shape}, not {value}"
      )


def begin(
  environment: Environment, targets: Any, keys: Key[Array, "B G"], length: int
) -> Episodes:
  """Begins trajectories of at most `length` tokens, T."""
  reset_group = jax.vmap(environment.reset, in_axes=(None, 0))
  b, g = keys.shape
  zero = jnp.zeros((b, g), jnp.int32)
  return Episodes(
    state=jax.vmap(reset_group)(targets, _keys(keys, zero)),
    observation=jnp.zeros((b, g, environment.observation_length), jnp.int32),
    length=zero,
    read=zero,
    begin=zero,
    turn=zero,
    turns=jnp.full((b, g, length), -1, jnp.int32),
    rewards=jnp.zeros((b, g, environment.max_turns), jnp.float32),
  )


def advance(
  environment: Environment,
  episodes: Episodes,
  ids: Int[Array, "B G T"],
  keys: Key[Array, "B G"],
  length: Int[Array, "B G"],
  limit: Int[Array, "B G"],
  ended: Bool[Array, "B G"],
) -> tuple[Episodes, Bool[Array, "B G"], Bool[Array, "B G"]]:
  """Steps the environments of the rows whose turn has `ended`.

  Each row has `length` tokens so far, at most `limit`. If the observation and a
  further token do not fit, or after the last turn, the trajectory ends without
  the observation. Returns the episodes, and masks of the environments that are
  done and of the finished trajectories.
  """
  step_all = jax.vmap(jax.vmap(environment.step))

  def step(episodes):
    # Each row [T] is rolled so that its turn begins at index 0.
    turn_ids = jax.vmap(jax.vmap(jnp.roll))(ids, -episodes.begin)
    state, (answer, count, reward, done) = step_all(
      episodes.state,
      turn_ids,
      # Other rows run too, on a valid length; `choose` drops their results.
      jnp.where(ended, length - episodes.begin, 1),
      _keys(keys, episodes.turn + 1),
    )
    last = episodes.turn + 1 >= environment.max_turns
    # Room for the observation and a further token, which the policy draws.
    over = done | last | (length + count + 1 > limit)
    at_turn = jnp.arange(environment.max_turns) == episodes.turn[..., None]
    new = episodes._replace(
      state=state,
      observation=answer,
      length=jnp.where(over, 0, count),
      read=jnp.zeros_like(episodes.read),
      # The next turn begins after the observation.
      begin=length + count,
      turn=episodes.turn + 1,
      rewards=jnp.where(at_turn, reward[..., None], episodes.rewards),
    )

    def choose(new, old):
      # [B, G, 1, ...], to broadcast over the axes of the state.
      where = ended.reshape(*ended.shape, *[1] * (new.ndim - 2))
      return jnp.where(where, new, old)

    new = jax.tree.map(choose, new, episodes)
    return new, ended & done, ended & over

  def wait(episodes):
    return episodes, jnp.zeros_like(ended), jnp.zeros_like(ended)

  # The environments run only if a turn has ended in some row.
  return jax.lax.cond(jnp.any(ended), step, wait, episodes)


def returns(rollout: Rollout, targets: Any = None) -> Float[Array, "B G K"]:
  """A `reward_fn` that returns the environment's reward of each turn."""
  if rollout.turn_rewards is None:
    raise ValueError("grpojax.returns needs turn rewards: give environment=")
  return rollout.turn_rewards
