"""Optimizer and learning rate of a training run."""

import optax

from grpojax.core.optim import OPTIMIZERS, SCHEDULES, decays
from grpojax.training.settings.run import TrainSettings


def learning_rate(settings: TrainSettings) -> optax.Schedule:
  """Returns the learning rate per update: linear warmup, then the schedule."""
  optim = settings.optim
  updates = settings.steps * optim.update.epochs * optim.update.minibatches
  decay = max(updates - optim.warmup_steps, 1)
  peak = optim.learning_rate
  schedule = SCHEDULES[optim.schedule](peak, decay)
  if not optim.warmup_steps:
    return schedule
  first = peak / (optim.warmup_steps + 1)  # not 0, to use the first update
  warmup = optax.linear_schedule(first, peak, optim.warmup_steps)
  return optax.join_schedules([warmup, schedule], [optim.warmup_steps])


def optimizer(settings: TrainSettings) -> optax.GradientTransformation:
  """Returns the optimizer with decoupled weight decay (`core.optim.decays`)."""
  optim = settings.optim
  scale = OPTIMIZERS[optim.name](
    b1=optim.b1,
    b2=optim.b2,
    moments_dtype=optim.moments_dtype,
    seed=settings.seed,
  )
  return optax.chain(
    scale,
    optax.add_decayed_weights(optim.weight_decay, mask=decays),
    optax.scale_by_learning_rate(learning_rate(settings)),
  )
