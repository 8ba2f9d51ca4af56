"""Entropy in the loss: a bonus for it, and the tokens that have most of it.

The entropy is that of the distribution that a token was sampled from, in nats,
given the sampled prefix; its gradient leaves out that of the prefix.

The bonus is `entropy_coef` times the mean entropy of the tokens in the
surrogate (those of `off_policy_sequences` too), over the whole optimizer batch,
whatever the loss's weighting. With an `entropy_target` there is a bonus only
while the entropy is not above it, and the coefficient moves by
`entropy_coef_delta` after each optimizer update: up if the entropy is at most
the target, else down, within 0 and `entropy_coef_max` (arXiv 2505.22312,
section 4).
"""

import typing

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.objective import Objective


@typing.no_type_check
@struct.dataclass
class EntropyControl:
  """State of an adaptive bonus, from one optimizer update to the next."""

  coefficient: Float[Array, ""]  # of the next update
  entropy: Float[Array, ""]  # mean of the last one, in nats; inf first


def init_control(objective: Objective) -> EntropyControl | None:
  """Returns the state before the first update; None where nothing adapts."""
  if not objective.entropy_target:
    return None
  return EntropyControl(
    coefficient=jnp.asarray(objective.entropy_coef, jnp.float32),
    entropy=jnp.asarray(jnp.inf, jnp.float32),
  )


def coefficient(
  objective: Objective, control: EntropyControl | None
) -> float | Float[Array, ""]:
  """Coefficient in this update: 0 while the last one's entropy is above target.

  ValueError for a target without a state.
  """
  target = objective.entropy_target
  if not target:
    return objective.entropy_coef
  if control is None:
    raise ValueError(
      "an entropy bonus with a target adapts its coefficient, which is part of "
      "the state: state.replace(entropy=entropy.init_control(objective))"
    )
  return jnp.where(control.entropy <= target, control.coefficient, 0.0)


def adapt(
  objective: Objective,
  control: EntropyControl | None,
  entropy: Float[Array, ""],
  skipped: Bool[Array, ""],
) -> EntropyControl | None:
  """Returns the state after an update; a `skipped` one leaves it as it is."""
  if control is None:
    return None
  step, most = objective.entropy_coef_delta, objective.entropy_coef_max
  move = jnp.where(entropy <= objective.entropy_target, step, -step)
  moved = jnp.clip(control.coefficient + move, 0.0, most)
  return EntropyControl(
    coefficient=jnp.where(skipped, control.coefficient, moved),
    entropy=jnp.where(skipped, control.entropy, entropy),
  )


def mean_entropy(
  entropy: Float[Array, "*S"],
  token_mask: Bool[Array, "*S"],
  tokens: Int[Array, ""] | None = None,
) -> Float[Array, ""]:
  """Mean over the tokens of the mask, or a part's share of it.

  `tokens` is then the number of these with those of all other parts.
  """
  count = jnp.sum(token_mask) if tokens is None else tokens
  total = jnp.sum(jnp.where(token_mask, entropy, 0.0))
  return total / jnp.maximum(count, 1).astype(total.dtype)


def highest_entropy(
  entropy: Float[Array, "*S"], mask: Bool[Array, "*S"], share: float | int
) -> Bool[Array, "*S"]:
  """True on the tokens of highest entropy, at which a completion may fork.

  Of n tokens the floor(share (n - 1)) + 1 of highest entropy, and those that
  tie with the last of them: all that reach the quantile 1 - share of the
  entropies (arXiv 2506.01939, equation 5, with share 0.2). Outside the mask the
  entropy may be anything, and the result is False.
  """
  falling = -jnp.sort(jnp.where(mask, -entropy, jnp.inf).ravel())
  last = jnp.floor(share * (jnp.sum(mask) - 1).astype(jnp.float32))
  # Without any token the threshold is that of padding.
  threshold = falling[jnp.maximum(last, 0).astype(jnp.int32)]
  return mask & (entropy >= threshold)
