"""Aggregation of several rewards for one completion.

| aggregation        | reward that a group compares                          |
|--------------------|-------------------------------------------------------|
| sum_then_normalize | Z_i = sum_k w_k Z_ki, the weighted sum                |
| normalize_then_sum | sum_k w_k (Z_ki - mean_j Z_kj) / std_j Z_kj (GDPO)    |

In the sum a reward counts as much as its spread is wide. Normalised first,
every reward counts by its weight whatever its scale, at the price of
`advantages.grpo`: prompts are weighted. GDPO (arXiv 2601.05242) divides the
result by its deviation over the batch, which is the advantage `batch_std`.
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
  """Weighted sum of rewards, each of which is normalised in its group.

  As TRL's "normalize_then_sum" before its batch normalisation: without unit,
  and every group sums to 0. A missing value (nan) counts as 0, its function's
  mean; the result is nan if all are missing. `epsilon` is added to the standard
  deviations. ValueError if G < 2, or unless there is one weight per function.
  """
  values = as_float(values, "normalize_then_sum", least=2)
  weights = jnp.asarray(weights, values.dtype)
  if weights.shape != values.shape[:1]:
    raise ValueError(
      f"normalize_then_sum takes one weight a reward function: values "
      f"{values.shape} need weights {values.shape[:1]}, not {weights.shape}"
    )
  total = jnp.tensordot(weights, grpo(values, epsilon=epsilon), 1)
  return jnp.where(jnp.any(present(values), 0), total, jnp.nan)


AGGREGATIONS = {
  "sum_then_normalize": None,
  "normalize_then_sum": normalize_then_sum,
}
"""Names as in TRL; None is the sum that the pool of reward functions makes."""
