"""Error of a batch's gradient by group size, and the best size.

With N = B G samples, large groups estimate the value V(x) of their prompt well
but leave few prompts. `observe` tracks the best size during training.
"""

import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Real

from grpojax.statistics import u_statistics
from grpojax.statistics.u_statistics import Estimators, Moments

Numbers = Real[Array, "*#X"] | float | int


class Components(NamedTuple):
  """Components of a batch's error, all squared lengths of gradients."""

  c1: Float[Array, "*X"]  # tr Var_x g(x), between prompts
  c2: Float[Array, "*X"]  # E_x tr Var(s delta), within prompts
  c3: Float[Array, "*X"]  # E_x [I sigma^2 + ||g||^2], from estimating V(x)
  c2_vanilla: Float[Array, "*X"]  # E_x tr Var(s Z), without a baseline
  gradient_sq: Float[Array, "*X"]  # ||E_x g(x)||^2


def components(moments: Moments, gradients: Float[Array, "X d"]) -> Components:
  """Averages exact moments and gradients over prompts."""
  means = Moments(*map(jnp.mean, moments))
  gradient_sq = jnp.sum(jnp.mean(gradients, 0) ** 2)
  return Components(
    c1=means.gradient_sq - gradient_sq,
    c2=means.oracle_trace,
    c3=means.remainder,
    c2_vanilla=means.vanilla_trace,
    gradient_sq=gradient_sq,
  )


def mse_curve(
  components: Components,
  group_sizes: Real[Array, "S"] | Real[np.ndarray, "S"] | int,
  num_samples: int,
  prompts: int | None = None,
) -> Estimators:
  """Returns errors of a batch's gradient by group size at a fixed budget.

  Leave-one-out: c1 G / N + c2 / N + c3 / (N (G - 1)), Proposition 3 of arXiv
  2603.01162 with its remainder; the oracle's error lacks the last term. G >= 2,
  N = `num_samples` is the size of the batch, and B = N / G is not rounded.

  If the data has M = `prompts` prompts, each is drawn once per epoch. A batch
  that starts with an epoch has r = B mod M prompts beyond whole epochs, and c1
  / B becomes M / (M - 1) c1 r (1 - r / M) / B^2. Within an epoch this equals M
  / (M - 1) c1 (1 / B - 1 / M); at its end it is 0. A batch may span several
  steps of nearly equal parameters. A diagnosis estimates M / (M - 1) c1.
  """
  c = components
  n = num_samples
  g = u_statistics.check_sizes(group_sizes)
  between = c.c1 * g / n  # c1 / B
  if prompts is not None:
    draws = n / g
    scale = prompts / max(prompts - 1, 1)
    extra = jnp.mod(draws, prompts)
    between = scale * c.c1 * extra * (1 - extra / prompts) / draws**2
  unbiased = between + c.c2 / n + c.c3 / (n * (g - 1))
  return Estimators(
    vanilla=between + c.c2_vanilla / n,
    leave_one_out=unbiased,
    # Its expectation is (G - 1) / G times the gradient.
    centred=((g - 1) / g) ** 2 * unbiased + c.gradient_sq / g**2,
    oracle=between + c.c2 / n,
  )


def optimal_group_size(
  c1: Numbers, c2: Numbers, c3: Numbers, prompt_cost: float | int = 0.0
) -> Float[Array, "*X"]:
  """Returns the group size G* of least error at a fixed budget, not rounded.

  G* = 1 + sqrt(c3 / c1) at every budget and for every c2 (arXiv 2603.01162,
  Theorem 7, has sqrt(c3 / c1) from an upper bound). If a prompt costs as much
  as `prompt_cost` = kappa > 0 completions, G* minimises (kappa + G) (c1 + c2 /
  G + c3 / (G (G - 1))), a convex function of G > 1. G* is inf if c1 <= 0, and
  nan if a component is nan.
  """
  if not prompt_cost >= 0:
    raise ValueError(f"prompt_cost = {prompt_cost}: give 0 or more completions")
  c1, c2, c3 = jnp.broadcast_arrays(
    *(jnp.asarray(c, jnp.result_type(float)) for c in (c1, c2, c3))
  )
  prompts_differ = c1 > 0
  # If c1 <= 0, G* is inf; the divisor 1 only avoids a division by 0.
  divisor = jnp.where(prompts_differ, c1, 1)
  b, c = jnp.maximum(c2, 0) / divisor, jnp.maximum(c3, 0) / divisor
  # G* - 1 is the number of samples in a baseline.
  baseline = jnp.sqrt(c)
  if prompt_cost:
    baseline = _baseline_at_cost(b, c, prompt_cost)
  best = jnp.where(prompts_differ, 1 + baseline, jnp.inf)
  return jnp.where(jnp.isnan(c1 + c2 + c3), jnp.nan, best)


def _baseline_at_cost(
  b: Float[Array, "*X"], c: Float[Array, "*X"], prompt_cost: float | int
) -> Float[Array, "*X"]:
  """Solves for u = G* - 1 if each prompt costs kappa = `prompt_cost` > 0.

  With b = c2 / c1 and c = c3 / c1 the derivative with respect to G of
  (kappa + G) (1 + b / G + c / (G u)), times G^2 u^2, is

      G^2 u^2 - c G^2 - kappa (b u^2 + c (2 G - 1)).

  As u < G and 2 G - 1 <= G^2, u^2 at its only root is between c and c + kappa
  (b + 2 c): 60 bisections find u to the last digit.
  """

  def slope(u):
    g = 1 + u
    costs = prompt_cost * (b * u**2 + c * (2 * g - 1))
    return g**2 * u**2 - c * g**2 - costs

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    # The derivative is negative below its root.
    above = slope(middle) < 0
    return jnp.where(above, middle, low), jnp.where(above, high, middle)

  bounds = jnp.sqrt(c), jnp.sqrt(c + prompt_cost * (b + 2 * c))
  low, high = jax.lax.fori_loop(0, 60, halve, bounds)
  return (low + high) / 2


@typing.no_type_check
@struct.dataclass
class GroupSizeChoice:
  """Group size of the next step, and the discounted sums it is based on."""

  group_size: Int[Array, ""]  # a power of two
  c1: Float[Array, ""]
  c3: Float[Array, ""]
  c1_variance: Float[Array, ""]  # squared standard error
  c3_variance: Float[Array, ""]


def init_choice(group_size: int) -> GroupSizeChoice:
  """Returns the initial choice, with empty sums."""
  zeros = (jnp.zeros(()) for _ in range(4))  # JAX donates no buffer twice
  return GroupSizeChoice(jnp.asarray(group_size, jnp.int32), *zeros)


def observe(
  choice: GroupSizeChoice,
  c1: Float[Array, ""],
  c1_se: Float[Array, ""],
  c3: Float[Array, ""],
  c3_se: Float[Array, ""],
  *,
  smallest: int,
  largest: int,
  decay: float | int,
  margin: float | int,
  confidence: float | int,
) -> GroupSizeChoice:
  """Doubles or halves the group size if G* is clearly above or below it.

  G* = 1 + sqrt(c3 / c1) is above G 2^(1/2 + margin) if c3 - K c1 > 0, with K =
  (G 2^(1/2 + margin) - 1)^2. G doubles if this difference is `confidence`
  standard errors above 0, and halves likewise. Thus c1, which is small and
  noisy, is never a divisor. Observations that are not finite are skipped; each
  observation multiplies the earlier sums by `decay`, within [0, 1).
  """
  new = jnp.stack([c1, c3, c1_se**2, c3_se**2])
  is_finite = jnp.all(jnp.isfinite(new))
  x = choice
  past = jnp.stack([x.c1, x.c3, x.c1_variance, x.c3_variance])
  # A sum times `decay` has a variance times decay^2.
  weights = jnp.array([decay, decay, decay**2, decay**2], past.dtype)
  sums = jnp.where(is_finite, weights * past + new, past)
  c1, c3, c1_variance, c3_variance = sums

  def evidence(size):
    """Returns c3 - K c1 in standard errors, positive if G* is above `size`."""
    k = (size - 1) ** 2
    error = jnp.sqrt(c3_variance + k**2 * c1_variance)
    return (c3 - k * c1) / jnp.maximum(error, 1e-30)

  current = choice.group_size
  step = 2 ** (0.5 + margin)  # G* > sqrt(2) G is nearer to 2 G than to G
  up = is_finite & (evidence(current * step) > confidence)
  down = is_finite & (evidence(current / step) < -confidence)
  lower = jnp.where(down, current // 2, current)
  size = jnp.where(up, current * 2, lower)
  return GroupSizeChoice(
    jnp.clip(size, smallest, largest), c1, c3, c1_variance, c3_variance
  )
