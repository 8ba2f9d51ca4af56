"""How long TRL trains, and at which learning rate, as ours.

Of transformers 5, which does it: trainer.py (set_initial_training_values),
trainer_optimizer.py and optimization.py; and of TRL's RepeatSampler.
"""

import math

from grpojax.translation import common
from grpojax.translation.parts import (
  Theirs,
  Translation,
  also,
  differs,
  setting,
)

_NAMES = common.OptimizerNames(
  "optim", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm"
)


def steps(
  theirs: Theirs, updates: int, prompts: int, examples: int | None
) -> int | None:
  """Steps of the run; None where that depends on the data.

  Args:
    theirs: TRL's settings.
    updates: of the optimizer, a step.
    prompts: of a step.
    examples: of the training data; what does not fill a step is left out of an
      epoch.
  """
  if theirs["max_steps"] > 0:
    return max(math.ceil(theirs["max_steps"] / updates), 1)
  if examples is None:
    return None
  an_epoch = max(examples // prompts * updates, 1)
  in_all = math.ceil(theirs["num_train_epochs"] * an_epoch)
  return max(math.ceil(in_all / updates), 1)


def translate(theirs: Theirs, updates: int) -> Translation:
  """The optimizer and its learning rate.

  Args:
    theirs: TRL's settings.
    updates: of the optimizer, in all.
  """
  found = common.optimizer(theirs, _NAMES) + _warmup(theirs, updates)
  if theirs["weight_decay"]:
    found += differs(
      "weight_decay", "TRL leaves norms and biases out; here all parameters"
    )
  for ours, name in (("b1", "adam_beta1"), ("b2", "adam_beta2")):
    found += setting(theirs, f"optim.{ours}", name, float(theirs[name]))
  return found


def _warmup(theirs: Theirs, updates: int) -> Translation:
  count, ratio = theirs["warmup_steps"], theirs["warmup_ratio"]
  if isinstance(count, float) and 0 < count < 1:
    count, ratio = 0, count
  if ratio and not count:
    count = math.ceil(ratio * updates)
  said = theirs.said("warmup_ratio" if ratio else "warmup_steps")
  if count and theirs["lr_scheduler_type"] == "constant":
    return also("optim.warmup_steps", 0, said) + differs(
      "lr_scheduler_type",
      "'constant' has no warm-up in TRL, whatever warmup_steps is;"
      f" optim.warmup_steps = {int(count)} would be constant_with_warmup",
    )
  found = also("optim.warmup_steps", int(count or 0), said)
  if count:
    found += differs(
      "warmup_steps",
      "TRL's first update is at a rate of 0, and changes nothing; here it is at"
      f" 1/{int(count) + 1} of learning_rate, and the rate rises by as much"
      " with each update",
    )
  return found
