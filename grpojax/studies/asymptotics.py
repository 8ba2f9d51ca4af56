"""The limit of the suboptimality gap, and distances between distributions.

Stochastic gradient ascent with step sizes eta / (n + offset) ends at theta*
like sqrt(n) (theta_n - theta*) -> N(0, S), so the scaled gap converges to a
weighted sum of chi-squares,

  n (J* - J(theta_n)) -> 1/2 sum_k lambda_k chi2_1,

lambda the eigenvalues of H^1/2 S H^1/2, H the curvature -grad^2 J(theta*)
(arXiv 2603.01162, Theorem 8). All in float64.
"""

import numpy as np
import scipy  # scipy.linalg and scipy.stats come when first used
from jaxtyping import Float


def limit_covariance(
  curvature: Float[np.ndarray, "d d"],
  noise: Float[np.ndarray, "d d"],
  eta: float,
) -> Float[np.ndarray, "d d"]:
  """Covariance S that sqrt(n) (theta_n - theta*) converges to.

  It solves (eta H - I/2) S + S (eta H - I/2) = eta^2 noise (V. Fabian, 1968,
  "On asymptotic normality in stochastic approximation"). `noise` is the
  covariance of one step's gradient estimate at theta*. Where eta H - I/2 is not
  positive definite the gap goes to 0 slower than 1/n, and there is no limit.
  """
  drift = eta * curvature - np.eye(len(curvature)) / 2
  return scipy.linalg.solve_continuous_lyapunov(drift, eta**2 * noise)


def chi_square_weights(
  curvature: Float[np.ndarray, "d d"], covariance: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "d"]:
  """Eigenvalues of H^1/2 S H^1/2 / 2, in units of J: the chi-squares' weights.

  Their sum is the mean of the limit distribution.
  """
  h, basis = np.linalg.eigh(curvature)
  root = basis * np.sqrt(h)  # root root^T = H
  return np.linalg.eigvalsh(root.T @ covariance @ root) / 2


def chi_square_quantiles(
  weights: Float[np.ndarray, "d"], count: int = 5000
) -> Float[np.ndarray, "Q"]:
  """Medians of `count` equal parts of sum_k weights_k chi2_1, ascending.

  From 200 draws a part: the distribution function is off by at most 0.0014
  (95%) with the default count.
  """
  draws = np.random.default_rng(0).normal(size=(200 * count, len(weights)))
  ordered = np.sort(draws**2 @ weights)
  return np.median(ordered.reshape(count, 200), axis=-1)


def linear_gap(
  curvature: Float[np.ndarray, "d d"],
  noise: Float[np.ndarray, "d d"],
  start: Float[np.ndarray, "d"],
  eta: float,
  offset: int | float,
  steps: tuple[int, ...],
) -> Float[np.ndarray, "S"]:
  """Mean gaps E[J* - J(theta_n)], if J were quadratic, the noise constant.

  Along the eigenvector i of H the mean square m of theta - theta* follows
  m <- (1 - a h_i)^2 m + a^2 noise_ii with a = eta / (n + offset). Against the
  limit it tells how far the start and the offset are still felt; what remains
  between it and a run is the curvature of everything else. `start` is theta_0 -
  theta*, and `steps` the numbers n, ascending, of the gaps.
  """
  h, basis = np.linalg.eigh(curvature)
  noise_diagonal = np.einsum("ij,ik,kj->j", basis, noise, basis)
  square, gaps = (basis.T @ start) ** 2, {}
  for n in range(1, steps[-1] + 1):
    a = eta / (n + offset)
    square = (1 - a * h) ** 2 * square + a**2 * noise_diagonal
    gaps[n] = h @ square / 2
  return np.array([gaps[n] for n in steps])


def distances(
  a: Float[np.ndarray, "m"], b: Float[np.ndarray, "n"]
) -> tuple[float, float]:
  """Distances between two samples' distributions.

  Kolmogorov-Smirnov, max |F_a - F_b|, and Wasserstein-1, the integral of
  |F_a - F_b|, in units of the samples.
  """
  furthest = scipy.stats.ks_2samp(a, b, method="asymp").statistic
  return float(furthest), float(scipy.stats.wasserstein_distance(a, b))


def null_bands(
  quantiles: Float[np.ndarray, "Q"], size: int
) -> tuple[float, float]:
  """Distances from a distribution that 95% of its samples stay below.

  Of 200 samples of `size` draws each: Kolmogorov-Smirnov, Wasserstein-1.
  """
  rng = np.random.default_rng(1)
  samples = rng.choice(quantiles, size=(200, size))
  apart = [distances(sample, quantiles) for sample in samples]
  ks, w1 = np.quantile(apart, 0.95, axis=0)
  return float(ks), float(w1)
