"""Aggregation of several rewards per completion.

| aggregation        | reward that a group compares                          |
|--------------------|-------------------------------------------------------|
| sum_then_normalize | Z_i = sum_k w_k Z_ki, the weighted sum                |
| normalize_then_sum | sum_k w_k (Z_ki - mean_j Z_kj) / std_j Z_kj (GDPO)    |

In `sum_then_normalize` rewards with a wide spread dominate.
`normalize_then_sum` counts rewards by weight, whatever their scale, but weights
prompts as `advantages.grpo` does. For GDPO (arXiv 2601.05242), which also
divides the result by its deviation over the batch, use `batch_std`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from grpojax.core.advantages import grpo
from grpojax.core.group_axis import as_float, present


def normalize_then_sum(
  values: Shaped[Array, "K *B G"],
  weights: Sequence[int | float] | Shaped[Array, "K"],
  *,
  epsilon: float = 1e-6,
) -> Float[Array, "*B G"]:
  """Weighted sum of rewards, each normalised within its group.

  Equals TRL's "normalize_then_sum" before its batch normalisation: unitless,
  and each group sums to 0. A missing value (nan) gets its reward function's
  mean in the group; a sample without values gets nan. `epsilon` is added to
  standard deviations. ValueError if G < 2 or for a wrong number of weights.
  """
  values = as_float(values, "normalize_then_sum", least=2)
  weights = jnp.asarray(weights, values.dtype)
  if weights.shape != values.shape[:1]:
    raise ValueError(
      f"normalize_then_sum takes one weight per reward function: values "
      f"{values.shape} need weights {values.shape[:1]}, not {weights.shape}"
    )
  total = jnp.tensordot(weights, grpo(values, epsilon=epsilon), 1)
  return jnp.where(jnp.any(present(values), 0), total, jnp.nan)


AGGREGATIONS = {
  "sum_then_normalize": None,
  "normalize_then_sum": normalize_then_sum,
}
"""Aggregations by TRL's names. None: the reward pool computes the sum."""
