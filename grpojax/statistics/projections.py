"""Directional derivatives of sequence log-probabilities, in forward mode."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PyTree

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.packing.micro_batches import split_rows
from grpojax.core.random_keys import random_key
from grpojax.core.types import LM, Params, Rollout


def rademacher_like(
  key: Key[Array, ""], tree: PyTree[Float[Array, "..."]]
) -> PyTree[Float[Array, "..."]]:
  """Draws random signs v, for which E[v v^T] = I and (v . s)^2 varies least."""
  signs = lambda x, key: jax.random.rademacher(key, x.shape, x.dtype)
  keys = optax.tree.split_key_like(key, tree)
  return jax.tree.map(signs, tree, keys)


def score_projections(
  lm: LM,
  params: Params,
  rollout: Rollout,
  key: Key[Array, ""],
  *,
  tangents: int = 4,
  micro_batches: int = 1,
  split: Callable[[Params], tuple[Any, Callable[[Any], Params]]] | None = None,
  vectorized: bool = True,
  sampling: Sampling = Sampling(),
  chunk_size: int = 0,
) -> Float[Array, "V B G"]:
  """Computes directional derivatives of sequence log-probabilities, in nats.

  a_{v,b,i} = v . grad log pi(Y_{b,i} | x_b), for V = `tangents` random
  directions and a rollout without padding rows. Costs about 1 + 2 V forward
  passes, and memory for V copies of the trained parameters.

  The batch is split into `micro_batches` parts, a divisor of B; `chunk_size` is
  as in `token_logprobs`. `split` is `(params) -> (moving, merge)`
  with `merge(moving)` = params; gradients are with respect to the trained
  parameters `moving`, by default all. `vectorized=False` computes one direction
  at a time, in about 3 V forward passes, for models that cannot be vmapped
  (`jax.lax.ragged_dot`). `sampling` is that of the rollout.
  """
  prompts = rollout.prompt_ids.shape[0]
  if prompts % micro_batches:
    raise ValueError(
      f"micro_batches={micro_batches} must divide {prompts} prompts"
    )
  lm = lm.forward_mode or lm
  moving, merge = split(params) if split else (params, lambda moving: moving)
  directions = jax.vmap(lambda k: rademacher_like(k, moving))(
    jax.random.split(random_key(key), tangents)
  )  # like `moving`, with a leading axis V

  def project(part: Rollout):  # [V, prompts of the part, G]
    def sequence_logprobs(moving):  # [prompts, G]
      logprobs, _ = token_logprobs(
        lm,
        merge(moving),
        part.prompt_ids,
        part.prompt_mask,
        part.completion_ids,
        sampling=sampling,
        chunk_size=chunk_size,
      )
      return jnp.sum(jnp.where(part.sampled, logprobs, 0.0), axis=-1)

    def derivative(direction):
      _, along_direction = jax.jvp(sequence_logprobs, (moving,), (direction,))
      return along_direction

    if vectorized:
      return jax.vmap(derivative)(directions)
    return jax.lax.map(derivative, directions)

  by_part = jax.lax.map(project, split_rows(rollout, micro_batches))
  # [parts, V, rows, G]. `split_rows` puts prompt r in row r // parts of part
  # r % parts, so moving the axis of parts after rows restores their order.
  return jnp.moveaxis(by_part, 0, 2).reshape(tangents, prompts, -1)
