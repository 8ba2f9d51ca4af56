"""The optimizer of a training run: AdamW under a schedule.

A schedule plugs in by its name in `SCHEDULES`: (peak learning rate, updates
after the warm-up) -> an optax schedule of the updates since the warm-up.
"""

import optax
from ml_collections import ConfigDict

SCHEDULES = {
  "constant": lambda peak, updates: optax.constant_schedule(peak),
  "cosine": lambda peak, updates: optax.cosine_decay_schedule(peak, updates),
  "linear": lambda peak, updates: optax.linear_schedule(peak, 0.0, updates),
}


def optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """AdamW under the config's schedule, after a linear warm-up."""
  optim = config.optim
  updates = config.steps * optim.epochs * optim.minibatches
  decay = max(updates - optim.warmup_steps, 1)
  peak = optim.learning_rate
  schedule = SCHEDULES[optim.schedule](peak, decay)
  if optim.warmup_steps:  # from the first update on: none of them is at 0
    first = peak / (optim.warmup_steps + 1)
    warmup = optax.linear_schedule(first, peak, optim.warmup_steps)
    schedule = optax.join_schedules([warmup, schedule], [optim.warmup_steps])
  return optax.adamw(
    schedule, b1=optim.b1, b2=optim.b2, weight_decay=optim.weight_decay
  )
