"""Dynamic sampling: replaces groups of equal rewards by groups of new prompts.

DAPO (arXiv 2503.14476, equation 11) draws prompts until a batch has B groups
that vary. Let p(x) be the probability that the group of prompt x varies, p its
mean, and g(x) the mean of the group's gradient U. Prompt x is p(x) / p times as
frequent in the batch as in the data. If U is 0 in groups of equal rewards
(`advantages.WITHIN_GROUPS`), E[U | x, varies] = g(x) / p(x). The two factors
cancel, so the mean of the kept groups estimates E[g(x)] / p. `acceptance` times
this mean estimates E[g(x)] without bias, whatever the limit on draws (on-policy
and without `token_mean`); docs/data.md lists other effects.

`batch_std` also divides by the deviation of the batch. Squared deviations are 0
in groups of equal rewards too, so the deviation of the kept groups is 1 /
sqrt(p) times that of all groups. The factor (`batch_std_scale`) is sqrt(p), not
p: exact if no further groups were drawn, else up to O(1 / B).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from grpojax.core import rows
from grpojax.core.types import Rollout


def acceptance(varied: Bool[np.ndarray, "M"], size: int) -> float:
  """Estimates the probability that a group varies, without bias.

  `varied` has an entry per group in the order drawn, until `size` varied or the
  limit was reached. If group m was the last needed, the estimate is (size - 1)
  / (m - 1) (Haldane, 1945), else the mean of `varied` (Girshick et al., 1946).
  """
  places = np.flatnonzero(varied)
  if len(places) < size:
    return len(places) / len(varied)
  drawn = int(places[size - 1]) + 1
  if size == 1:
    return float(drawn == 1)
  return (size - 1) / (drawn - 1)


def batch_std_scale(
  accepted: float, filled: int, size: int, group_size: int
) -> float:
  """Returns the factor that undoes dynamic sampling for `batch_std` advantages.

  It is sqrt(`accepted`) for a full batch. With `filled` < `size` groups it also
  corrects the variance's denominator, filled G - 1 instead of size G - 1.
  """
  if not filled:
    return 0.0
  return math.sqrt(
    accepted * (group_size - 1 / size) / (group_size - 1 / filled)
  )


def replace_groups(
  batch: Rollout, drawn: Rollout, source: Int[Array, "B"]
) -> Rollout:
  """Replaces groups of a batch by drawn groups. Jittable.

  source = [-1, 1, 0] keeps the first group of a batch of 3, and takes the
  second and third from drawn[1] and drawn[0]. Prompt lengths may differ.
  """
  kept = jnp.arange(len(source))
  chosen = jnp.where(source < 0, kept, len(source) + source)
  return rows.constrain(rows.take(rows.concatenate([batch, drawn]), chosen))
