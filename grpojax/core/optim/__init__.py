"""Optimizers and schedules by name, as optax's gradient transformations.

A schedule plugs in by its name in `SCHEDULES`: (peak learning rate, updates
after the warm-up) -> an optax schedule of the updates since the warm-up. An
optimizer plugs in by its name in `OPTIMIZERS`: (*, b1, b2, moments_dtype, seed)
-> what scales gradients, before the learning rate.
"""

import jax
import optax

from grpojax.core.optim import stochastic_rounding
from grpojax.core.optim.factored_rms import scale_by_factored_rms

SCHEDULES = {
  "constant": lambda peak, updates: optax.constant_schedule(peak),
  "cosine": lambda peak, updates: optax.cosine_decay_schedule(peak, updates),
  "linear": lambda peak, updates: optax.linear_schedule(peak, 0.0, updates),
}

# The number of no step: other random numbers are drawn from fold_in(key, step).
_ROUNDING = 2**31 - 1

MOMENTS = ("float32", "bfloat16")
"""Formats of Adam's two moments between updates, `optim.moments_dtype`."""


def adamw(
  *, b1: float, b2: float, moments_dtype: str, seed: int
) -> optax.GradientTransformation:
  """Makes Adam's scaling (Loshchilov and Hutter 2019, arXiv 1711.05101).

  The state has 8 bytes a parameter, or 4 with moments in bfloat16.
  """
  if moments_dtype == "float32":
    return optax.scale_by_adam(b1, b2)
  key = jax.random.fold_in(jax.random.key(seed), _ROUNDING)
  return stochastic_rounding.scale_by_adam(b1, b2, key)


def adafactor(
  *, b1: float, b2: float, moments_dtype: str, seed: int
) -> optax.GradientTransformation:
  """Makes Adafactor's scaling, without first moment (arXiv 1804.04235).

  The state has less than a hundredth of a byte a parameter in wide matrices.
  """
  del b1, moments_dtype, seed
  return scale_by_factored_rms(b2, stacks=("layers",))


OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor}
