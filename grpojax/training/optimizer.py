"""The optimizer of a training run: what scales a gradient, under a schedule.

A schedule plugs in by its name in `SCHEDULES`: (peak learning rate, updates
after the warm-up) -> an optax schedule of the updates since the warm-up. What
scales gradients plugs in by its name in `OPTIMIZERS`: (the `optim` section of a
settings, the run's seed) -> an optax transformation.
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

MOMENTS = {
  "float32": lambda b1, b2, seed: optax.scale_by_adam(b1, b2),
  "bfloat16": lambda b1, b2, seed: stochastic_rounding.scale_by_adam(
    b1, b2, jax.random.fold_in(jax.random.key(seed), _ROUNDING)
  ),
}
"""How Adam's two moments rest between updates; see `optim.moments_dtype`."""

OPTIMIZERS = {
  "adamw": lambda optim, seed: MOMENTS[optim.moments_dtype](
    optim.b1, optim.b2, seed
  ),
  # Of transformers; it has no first moment, and so no b1.
  "adafactor": lambda optim, seed: scale_by_factored_rms(
    optim.b2, stacks=("layers",)
  ),
}
"""What scales gradients. Beside parameters and gradients of 4 bytes each it
takes a parameter: AdamW 8 bytes, or 4 with moments in bfloat16 (Loshchilov and
Hutter 2019, arXiv 1711.05101); Adafactor less than a hundredth of one, where
matrices are wide (Shazeer and Stern 2018, arXiv 1804.04235)."""


def optimizer(settings) -> optax.GradientTransformation:
  """The config's optimizer and schedule, after a linear warm-up.

  The learning rate is absolute, and decays weights by `weight_decay` times
  itself, whatever scales the gradients.
  """
  optim = settings.optim
  updates = settings.steps * optim.update.epochs * optim.update.minibatches
  decay = max(updates - optim.warmup_steps, 1)
  peak = optim.learning_rate
  schedule = SCHEDULES[optim.schedule](peak, decay)
  if optim.warmup_steps:  # from the first update on: none of them is at 0
    first = peak / (optim.warmup_steps + 1)
    warmup = optax.linear_schedule(first, peak, optim.warmup_steps)
    schedule = optax.join_schedules([warmup, schedule], [optim.warmup_steps])
  return optax.chain(
    OPTIMIZERS[optim.name](optim, settings.seed),
    optax.add_decayed_weights(optim.weight_decay),
    optax.scale_by_learning_rate(schedule),
  )
