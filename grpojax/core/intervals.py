"""Statistics of samples: pass@k, and intervals that respect prompts."""

import math
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real


def pass_at_k(correct: Bool[Array, "*B n"], k: int) -> Float[Array, "*B"]:
  """Probability that at least one of k samples is correct, unbiased.

  1 - C(n - c, k) / C(n, k) with c correct among n: the mean, over all subsets
  of k samples, of "one of them is correct", an order-k U-statistic (arXiv
  2107.03374, equation 1). Computed as a product of k ratios, none of which is
  above 1, so no binomial coefficient overflows.

  Args:
    correct: one a sample.
    k: subset size, 1 <= k <= n.

  Returns:
    Estimates in [0, 1], float32.

  Raises:
    ValueError: if k is not within 1 .. n.
  """
  n = correct.shape[-1]
  if not 1 <= k <= n:
    raise ValueError(
      f"pass@{k} needs 1 <= k <= n, but there are n = {n} samples a prompt: "
      "sample more, or ask for a smaller k"
    )
  wrong = n - jnp.sum(correct, -1, keepdims=True)
  drawn = jnp.arange(k)
  # Exactly 0 as soon as the wrong samples run out.
  still_wrong = jnp.maximum(wrong - drawn, 0) / (n - drawn)
  return 1 - jnp.prod(still_wrong.astype(jnp.float32), -1)


def mean_interval(
  values: Real[Array, "B"], confidence: float = 0.95
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
  """Mean over prompts with Student's t interval.

  mean -+ t_{B-1} s / sqrt(B), s the sample standard deviation over prompts. A
  prompt is a cluster: `values` holds one number a prompt (its accuracy, or its
  pass@k), because samples of one prompt are not independent of each other when
  prompts are what varies. For two checkpoints on the same prompts give the
  differences (a paired test). Where nearly all values are equal to 0 or 1 the
  interval is too short: use `wilson_interval` for one greedy sample a prompt.

  Args:
    values: one a prompt, B >= 2.
    confidence: coverage, within (0, 1).

  Returns:
    Mean, lower and upper bound, in units of the values.

  Raises:
    ValueError: for fewer than two prompts, or a confidence outside (0, 1).
  """
  count = values.shape[0]
  if count < 2:
    raise ValueError(
      f"an interval over prompts needs at least 2 prompts, not {count}"
    )
  values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
  mean = jnp.mean(values)
  half = _t_quantile(confidence, count - 1) * jnp.std(values, ddof=1)
  half /= math.sqrt(count)
  return mean, mean - half, mean + half


def wilson_interval(
  successes: Int[Array, "*S"] | int, n: int, confidence: float = 0.95
) -> tuple[Float[Array, "*S"], Float[Array, "*S"], Float[Array, "*S"]]:
  """Success rate of n independent trials with Wilson's score interval.

  For greedy accuracy, one trial a prompt. Unlike the normal interval it stays
  within [0, 1] and keeps its coverage near 0 and 1 (E. B. Wilson, 1927,
  "Probable inference, the law of succession, and statistical inference").

  Args:
    successes: within 0 .. n.
    n: trials.
    confidence: coverage, within (0, 1).

  Returns:
    Rate, lower and upper bound, all within [0, 1].

  Raises:
    ValueError: for n < 1, or a confidence outside (0, 1).
  """
  if n < 1:
    raise ValueError(f"a success rate needs at least 1 trial, not {n}")
  _check_confidence(confidence)
  z = NormalDist().inv_cdf((1 + confidence) / 2)
  rate = jnp.asarray(successes, jnp.float32) / n
  centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
  half = jnp.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  half *= z / (1 + z * z / n)
  # At 0 and at n successes one bound is the rate itself, up to rounding.
  low = jnp.where(rate == 0, 0.0, centre - half)
  high = jnp.where(rate == 1, 1.0, centre + half)
  return rate, low, high


def _check_confidence(confidence: float) -> None:
  if not 0 < confidence < 1:
    raise ValueError(
      f"confidence is a probability within (0, 1), not {confidence}"
    )


def _t_quantile(confidence: float, degrees: int) -> float:
  """The t with P(|T| <= t) = confidence, T Student with `degrees` of freedom.

  Bisection on the angle theta = atan(t / sqrt(degrees)), in which the
  distribution function is a finite sum (Abramowitz and Stegun, 26.7.3 and
  26.7.4).
  """
  _check_confidence(confidence)
  degrees = min(degrees, 20_000)  # By then normal to 1e-4.
  even = degrees % 2 == 0
  i = np.arange(1, degrees // 2)
  ratios = (2 * i - 1) / (2 * i) if even else 2 * i / (2 * i + 1)
  terms = np.cumprod(np.concatenate([[1.0], ratios]))
  low, high = 0.0, math.pi / 2
  for _ in range(60):
    theta = (low + high) / 2
    cosine = math.cos(theta)
    powers = cosine ** (2 * np.arange(len(terms)))
    series = math.sin(theta) * float(terms @ powers)
    if even:
      probability = series
    else:
      inner = cosine * series if degrees > 1 else 0.0
      probability = 2 / math.pi * (theta + inner)
    if probability < confidence:
      low = theta
    else:
      high = theta
  return math.sqrt(degrees) * math.tan(low)
