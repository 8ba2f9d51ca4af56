"""Optimizer of a training run, on its schedule."""

import optax

from grpojax.core.optim import OPTIMIZERS, SCHEDULES
from grpojax.training.settings.run import TrainSettings


def optimizer(settings: TrainSettings) -> optax.GradientTransformation:
  """Returns the optimizer and its schedule, after a linear warm-up.

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
  scale = OPTIMIZERS[optim.name](
    b1=optim.b1,
    b2=optim.b2,
    moments_dtype=optim.moments_dtype,
    seed=settings.seed,
  )
  return optax.chain(
    scale,
    optax.add_decayed_weights(optim.weight_decay),
    optax.scale_by_learning_rate(schedule),
  )
