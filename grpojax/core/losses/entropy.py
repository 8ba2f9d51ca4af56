"""Entropy in the loss: an entropy bonus, and selection of uncertain tokens.

The entropy is that of the distribution from which a token was sampled, in nats,
given the sampled prefix; its gradient takes the prefix as constant.

The bonus is `entropy_coef` times the mean entropy over an optimizer batch,
whatever the weighting. The mean includes `off_policy_sequences`, which the
surrogate leaves out. With an `entropy_target` the bonus is on only while the
entropy is at most the target, and after each update the coefficient moves by
`entropy_coef_delta`: up if the entropy is at most the target, else down,
between 0 and `entropy_coef_max` (arXiv 2505.22312, section 4).
"""

import typing

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.objective import Objective

NAME = "entropy"  # of the control in the extras of a state


@typing.no_type_check
@struct.dataclass
class EntropyControl:
  """State of an adaptive entropy bonus between optimizer updates."""

  coefficient: Float[Array, ""]  # of the next update
  entropy: Float[Array, ""]  # mean in the last update, nats; at first inf


def init_control(objective: Objective) -> EntropyControl | None:
  """Returns the initial `EntropyControl`; None without an `entropy_target`."""
  if not objective.entropy_target:
    return None
  return EntropyControl(
    coefficient=jnp.asarray(objective.entropy_coef, jnp.float32),
    entropy=jnp.asarray(jnp.inf, jnp.float32),
  )


def coefficient(
  objective: Objective, control: EntropyControl | None
) -> float | Float[Array, ""]:
  """Coefficient in this update: 0 while the last entropy is above the target.

  ValueError for an `entropy_target` without `control`.
  """
  target = objective.entropy_target
  if not target:
    return objective.entropy_coef
  if control is None:
    raise ValueError(
      "entropy_target needs the adaptive coefficient in the state: use "
      "state.replace(extras={'entropy': init_control(objective)}), with "
      "init_control of grpojax.core.losses.entropy"
    )
  return jnp.where(control.entropy <= target, control.coefficient, 0.0)


def adapt(
  objective: Objective,
  control: EntropyControl,
  entropy: Float[Array, ""],
  skipped: Bool[Array, ""],
) -> EntropyControl:
  """Returns the next `EntropyControl`, unchanged if an update was `skipped`."""
  step = objective.entropy_coef_delta
  most = objective.entropy_coef_max
  # The entropy in this update moves the coefficient of the next one.
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
  """Mean entropy over the tokens of the mask, or a micro-batch's share of it.

  For a micro-batch, `tokens` is the number of tokens in the whole minibatch.
  """
  count = jnp.sum(token_mask) if tokens is None else tokens
  total = jnp.sum(jnp.where(token_mask, entropy, 0.0))
  return total / jnp.maximum(count, 1).astype(total.dtype)


def highest_entropy(
  entropy: Float[Array, "*S"], mask: Bool[Array, "*S"], share: float | int
) -> Bool[Array, "*S"]:
  """True on the tokens of highest entropy, at which a completion may fork.

  Selects all tokens that reach the quantile 1 - share of the entropies: of n
  tokens, the floor(share (n - 1)) + 1 of highest entropy, and ties with the
  last of them (arXiv 2506.01939, equation 5, with share 0.2). Outside the mask
  the entropy may be anything, and the result is False.
  """
  # Descending: first the n tokens of the mask, then -inf for padding.
  falling = -jnp.sort(jnp.where(mask, -entropy, jnp.inf).ravel())
  last = jnp.floor(share * (jnp.sum(mask) - 1).astype(jnp.float32))
  # Without any token the threshold is -inf, that of padding.
  threshold = falling[jnp.maximum(last, 0).astype(jnp.int32)]
  return mask & (entropy >= threshold)
