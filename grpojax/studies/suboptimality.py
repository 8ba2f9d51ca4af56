"""Compares the gap to the optimum after GRPO runs with its limit distribution.

    python -m grpojax.studies.suboptimality [--config.key=value ...]

Tests Theorem 8 and Corollaries 9 and 10 of arXiv 2603.01162 on the fully known
bandit of `studies.tabular`. Thousands of complete GRPO runs, with step sizes
eta / (n + 20) and N = B G samples per step, are compared in float64 with the
theory, which has no fitted constant:

  sqrt(n) (theta_n - theta*) -> N(0, S),
  n (J* - J(theta_n)) -> 1/2 sum_k lambda_k chi2_1.

Here H = -grad^2 J(theta*), and lambda are the eigenvalues of H^1/2 S H^1/2.

Writes results.csv (a row per estimator, G and n), quantiles.csv, summary.json
and suboptimality.png. The same command resumes after the last finished
estimator.
"""

import functools
import itertools
import pathlib
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy  # loads scipy.linalg and scipy.stats on first use
from jaxtyping import Float
from ml_collections import ConfigDict

from grpojax.core.random_keys import seed_key
from grpojax.core.step import init_state
from grpojax.core.types import Prompts
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run, tabular
from grpojax.studies.tabular import Matrix, Vector

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # rows of quantiles.csv
_CHUNK = 500  # steps between two lines of progress
OFFSET = 20  # step sizes are eta / (n + OFFSET)
# Estimator: name in the picture, colour, and horizontal shift of points.
ESTIMATORS = {
  "vanilla": ("vanilla", "C3", 0.93),
  "leave_one_out": ("GRPO", "C0", 1),
  "oracle": ("oracle", "C2", 1.07),
}
Quantiles = Float[np.ndarray, "Q"]

FLAGS = run.FLAGS
SETTINGS = run.settings(
  "suboptimality",
  seed=run.SEED,
  runs=setting(3000, "GRPO runs per estimator and G", within="[2, inf)"),
  steps=setting((100, 500, 2000), "steps n after which the gap is measured"),
  num_samples=setting(16, "N = B G completions per step"),
  group_sizes=setting((2, 4, 8, 16), "group sizes G"),
)


def config_errors(config: ConfigDict) -> list[tuple[str, str]]:
  """Lists errors that range checks miss, such as incompatible settings."""
  wrong = []
  for name, least in {"steps": 1, "group_sizes": 2}.items():
    values = config[name]
    whole = values and all(type(x) is int for x in values)
    if not whole or values[0] < least or sorted(set(values)) != list(values):
      wrong.append((name, f"must be increasing whole numbers, {least} or more"))
  if wrong:
    return wrong
  odd = [g for g in config.group_sizes if config.num_samples % g]
  if config.num_samples < 1 or odd:
    remedy = f"must be a positive multiple of every group size, not of {odd}"
    wrong.append(("num_samples", remedy))
  return wrong


def limit_covariance(curvature: Matrix, noise: Matrix, eta: float) -> Matrix:
  """Returns the covariance S of the limit of sqrt(n) (theta_n - theta*).

  It solves (eta H - I/2) S + S (eta H - I/2) = eta^2 noise (V. Fabian, 1968,
  "On asymptotic normality in stochastic approximation"). `noise` is the
  covariance of a step's gradient estimate at theta*. If eta H - I/2 is not
  positive definite, the gap decays slower than 1/n and there is no such limit.
  """
  drift = eta * curvature - np.eye(len(curvature)) / 2
  return scipy.linalg.solve_continuous_lyapunov(drift, eta**2 * noise)


def chi_square_weights(curvature: Matrix, covariance: Matrix) -> Vector:
  """Returns half the eigenvalues of H^1/2 S H^1/2, in units of J.

  These are the weights of chi2_1 in the limit; its mean is their sum.
  """
  # H S has the same eigenvalues: S v = lambda H^-1 v.
  return scipy.linalg.eigvalsh(covariance, np.linalg.inv(curvature)) / 2


def chi_square_quantiles(weights: Vector, count: int = 5000) -> Quantiles:
  """Returns `count` quantiles of sum_k weights_k chi2_1, ascending.

  Each is the median of 200 successive ordered draws. With the default count the
  error of the distribution function is at most 0.0014 (95%).
  """
  draws = np.random.default_rng(0).normal(size=(200 * count, len(weights)))
  ordered = np.sort(draws**2 @ weights)
  return np.median(ordered.reshape(count, 200), axis=-1)


def linear_gap(
  curvature: Matrix,
  noise: Matrix,
  start: Vector,
  eta: float,
  steps: Sequence[int],
) -> Float[np.ndarray, "S"]:
  """Returns mean gaps E[J* - J(theta_n)] for quadratic J and constant noise.

  Along the eigenvector i of H the mean square m of theta - theta* follows
  m <- (1 - a h_i)^2 m + a^2 noise_ii with a = eta / (n + OFFSET). This shows
  the influence of the offset and of `start` = theta_0 - theta*. `steps` holds
  the numbers n, ascending.
  """
  h, basis = np.linalg.eigh(curvature)
  noise_diagonal = np.einsum("ij,ik,kj->j", basis, noise, basis)
  square = (basis.T @ start) ** 2
  gaps = []
  for n in range(1, steps[-1] + 1):
    a = eta / (n + OFFSET)
    square = (1 - a * h) ** 2 * square + a**2 * noise_diagonal
    gaps.append(h @ square / 2)
  return np.array([gaps[n - 1] for n in steps])


def distances(
  a: Float[np.ndarray, "m"], b: Float[np.ndarray, "n"]
) -> tuple[float, float]:
  """Returns maximum (Kolmogorov-Smirnov) and integral (W1) of |F_a - F_b|."""
  furthest = scipy.stats.ks_2samp(a, b, method="asymp").statistic
  return float(furthest), float(scipy.stats.wasserstein_distance(a, b))


def null_bands(quantiles: Quantiles, size: int) -> tuple[float, float]:
  """Returns 95% quantiles of `distances` between the limit and `size` draws."""
  rng = np.random.default_rng(1)
  samples = rng.choice(quantiles, size=(200, size))
  apart = [distances(sample, quantiles) for sample in samples]
  ks, w1 = np.quantile(apart, 0.95, axis=0)
  return float(ks), float(w1)


class Bandit(NamedTuple):
  """A bandit with its optimum, curvature and step size."""

  problem: tabular.Problem
  optimum: Vector  # theta*
  curvature: Matrix  # H = -grad^2 J(theta*)
  eta: float  # 1 / smallest curvature; above half of it gaps fall as 1/n
  best: float  # J*


class Outcome(NamedTuple):
  """Scaled gaps n (J* - J) of an estimator and group size, and their limit."""

  gaps: Float[np.ndarray, "S R"]  # n (J* - J(theta_n)) by n and run
  limit: Quantiles  # of the limit distribution
  limit_mean: float
  linear_mean: Float[np.ndarray, "S"]  # mean gap by n, if J were quadratic
  bands: tuple[float, float]  # 95% quantiles of KS and W1 by chance


Outcomes = Mapping[tuple[str, int], Outcome]  # by estimator, group size


def bandit() -> Bandit:
  """Returns the bandit of the study."""
  sizes = {"prompts": 8, "vocab": 4, "dims": 3}
  problem = tabular.make_problem(0, **sizes, spread=0.5, beta=0.5)
  optimum = tabular.optimum(problem, np.zeros(sizes["dims"]))
  curvature = -tabular.derivatives(problem, optimum)[1]
  eta = float(1.0 / np.linalg.eigvalsh(curvature)[0])
  best = float(tabular.objective(problem, optimum))
  return Bandit(problem, optimum, curvature, eta, best)


def simulate(
  config: ConfigDict, known: Bandit, estimator: str, group_size: int
) -> Float[np.ndarray, "S R d"]:
  """Runs GRPO; returns the parameters of all runs at each of config.steps."""
  tx = optax.sgd(lambda count: known.eta / (count + 1 + OFFSET))
  step = tabular.make_step(known.problem, estimator, group_size, tx)
  reference = tabular.policy(known.problem).init(seed_key(0))
  shape = (config.num_samples // group_size, 1)

  def one_step(state, key):
    key = jax.random.fold_in(key, state.step)
    ids = jax.random.randint(key, shape, 0, len(known.problem.rewards))
    prompts = Prompts(ids, jnp.ones(shape, bool))
    return step(state, prompts, reference)[0]

  @functools.partial(jax.jit, donate_argnums=0)
  def advance(states, keys, steps):  # compiled once for any number of steps
    all_runs = lambda _, states: jax.vmap(one_step)(states, keys)
    return jax.lax.fori_loop(0, steps, all_runs, states)

  # Estimators and group sizes must not share random numbers.
  stream = zlib.crc32(f"{estimator} {group_size}".encode()) % 2**31
  key = jax.random.fold_in(seed_key(config.seed), stream)
  state_keys, keys = jax.random.split(key, (2, config.runs))
  states = jax.vmap(lambda key: init_state(reference, tx, key))(state_keys)
  began = time.perf_counter()
  step_number = 0
  snapshots = []
  for n in config.steps:
    while step_number < n:
      chunk = min(_CHUNK, n - step_number)
      states = advance(states, keys, chunk)
      step_number += chunk
      params = np.asarray(states.params, float)
      print(
        f"{estimator} G={group_size}: step {step_number}/{config.steps[-1]}, "
        f"{records.duration(time.perf_counter() - began)}",
        flush=True,
      )
    snapshots.append(params)
  return np.stack(snapshots)


def outcome(
  config: ConfigDict,
  known: Bandit,
  estimator: str,
  size: int,
  params: np.ndarray,
) -> Outcome:
  """Returns the gaps of runs with parameters [S, R, d], and theory's limit."""
  problem, optimum, h, eta, best = known
  steps = np.array(config.steps)
  gaps = (best - tabular.objective(problem, params)) * steps[:, None]
  noise = tabular.gradient_noise(problem, optimum, size, config.num_samples)
  noise = getattr(noise, estimator)
  weights = chi_square_weights(h, limit_covariance(h, noise, eta))
  limit = chi_square_quantiles(weights)
  linear = linear_gap(h, noise, -optimum, eta, config.steps) * steps
  bands = null_bands(limit, config.runs)
  return Outcome(gaps, limit, float(weights.sum()), linear, bands)


def best_group_size(known: Bandit) -> float:
  """Returns the group size whose limit has the smallest mean, for every N.

  The mean is linear in the noise, so it has the form a1 G + a2 + a3 / (G - 1)
  of Proposition 3, with its minimum at 1 + sqrt(a3 / a1).
  """

  def mean(estimator, g):
    noise = tabular.gradient_noise(known.problem, known.optimum, g, 1)
    s = limit_covariance(known.curvature, getattr(noise, estimator), known.eta)
    return chi_square_weights(known.curvature, s).sum()

  a1 = max(mean("oracle", 3) - mean("oracle", 2), 0.0)
  a3 = mean("leave_one_out", 2) - mean("oracle", 2)
  return float(1 + np.sqrt(a3 / a1)) if a1 else float("inf")


def tables(steps: tuple[int, ...], outcomes: Outcomes) -> dict[str, list[dict]]:
  """Returns the rows of the CSV files, by file name."""
  results = []
  quantiles = []
  for (estimator, g), x in outcomes.items():
    label = {"estimator": estimator, "group_size": g}
    for n, gaps, linear in zip(steps, x.gaps, x.linear_mean, strict=True):
      mean, low, high = mean_interval(gaps)
      ks, w1 = distances(gaps, x.limit)
      far = distances(gaps, outcomes["oracle", g].limit)
      row = label | {"n": n, "mean": mean, "low": low, "high": high}
      row |= {"limit_mean": x.limit_mean, "linear_mean": linear}
      row |= {"ks": ks, "w1": w1, "ks_band": x.bands[0], "w1_band": x.bands[1]}
      row |= {"ks_to_oracle_limit": far[0], "w1_to_oracle_limit": far[1]}
      results.append(run.rounded(row, 5))
    for level in LEVELS:
      runs, limit = (np.quantile(y, level) for y in (x.gaps[-1], x.limit))
      row = label | {"level": level, "runs": runs, "limit": limit}
      quantiles.append(run.rounded(row, 5))
  return {"results": results, "quantiles": quantiles}


def draw(axes: np.ndarray, steps: tuple[int, ...], outcomes: Outcomes) -> None:
  """Plots the distributions, means against G, and convergence in n."""
  tails, means, convergence = axes[0]
  sizes = sorted({g for _, g in outcomes})
  n = steps[-1]
  for estimator, (name, colour, shift) in ESTIMATORS.items():
    of_size = [outcomes[estimator, g] for g in sizes]
    _draw_tail(tails, of_size[0], colour, name)
    means.plot(sizes, [x.limit_mean for x in of_size], colour, lw=1)
    gaps = np.array([x.gaps[-1] for x in of_size])
    _draw_intervals(means, sizes, gaps, colour, name)
    shifted = np.array(steps) * shift
    ratio = np.array([x.gaps / x.limit_mean for x in of_size])
    _draw_intervals(convergence, shifted, ratio.mean(0), colour, None)
    linear = [x.linear_mean / x.limit_mean for x in of_size]
    convergence.plot(shifted, np.mean(linear, 0), f"{colour}--", lw=1)
  tails.set(
    yscale="log",
    xlabel=f"n x gap, n = {n}, G = {sizes[0]}",
    ylabel="share of runs above",
    title="Runs (points), theory (lines)",
  )
  tails.set_xlim(left=0)
  tails.legend(frameon=False)
  run.size_axis(means, sizes)
  means.set(
    xlabel="group size G, equal samples per step",
    ylabel=f"mean of n x gap, n = {n}",
    title="Means (95%), limit (lines)",
  )
  means.set_ylim(bottom=0)
  convergence.axhline(1, color="black", lw=1)
  convergence.set(
    xscale="log",
    xlabel="n, steps",
    ylabel="mean of n x gap / mean of the limit",
    title="Convergence (dashed: if quadratic)",
  )
  convergence.minorticks_off()
  convergence.set_xticks(steps, map(str, steps))


def _draw_tail(axis, result: Outcome, colour: str, name: str) -> None:
  """Plots the share of runs above each gap, with theory as a line."""
  gaps = np.sort(result.gaps[-1])
  above_limit, above = (
    1 - (np.arange(len(x)) + 0.5) / len(x) for x in (result.limit, gaps)
  )
  axis.plot(result.limit, above_limit, colour, lw=1)
  marks = np.geomspace(1, 0.5 / len(gaps), 40)
  points = np.unique(np.searchsorted(-above, -marks))
  points = points[points < len(gaps)]
  axis.plot(gaps[points], above[points], f"{colour}o", ms=3, label=name)


def _draw_intervals(axis, x, gaps, colour: str, label: str | None) -> None:
  half = 1.96 * gaps.std(-1, ddof=1) / np.sqrt(gaps.shape[-1])
  style = {"fmt": f"{colour}o", "ms": 3, "capsize": 2, "label": label}
  axis.errorbar(x, gaps.mean(-1), half, **style)


def compute(config: ConfigDict, directory: pathlib.Path) -> run.Results:
  """Simulates all runs and compares them with theory."""
  known = bandit()
  outcomes = {}
  for point in itertools.product(ESTIMATORS, config.group_sizes):
    path = directory / "{}_{}.npy".format(*point)
    if not path.exists():
      params = simulate(config, known, *point)
      with records.replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, params)
    outcomes[point] = outcome(config, known, *point, np.load(path))
  rows = tables(config.steps, outcomes)
  last = run.select(rows["results"], n=config.steps[-1])
  best = best_group_size(known)
  lines = [
    "{estimator:15} G={group_size:<3} n x gap {mean:.4f} [{low:.4f}, "
    "{high:.4f}], limit {limit_mean:.4f}; KS {ks:.4f} (chance "
    "{ks_band:.4f}), W1 {w1:.4f} ({w1_band:.4f})".format(**row)
    for row in last
  ]
  return run.Results(
    tables=rows,
    lines=[*lines, f"GRPO's limit is smallest at G = {best:.2f}"],
    draw=lambda axes: draw(axes, config.steps, outcomes),
    panels=(1, 3),
    summary={
      "theta_star": list(known.optimum),
      "curvature": list(np.linalg.eigvalsh(known.curvature)),
      "eta": known.eta,
      "best_group_size": best,
      "results": last,
    },
  )


def main(argv: list[str]) -> None:
  """Starts or resumes the study with the command line `argv`."""
  run.execute(argv, SETTINGS, config_errors, __doc__, compute)


if __name__ == "__main__":
  main(sys.argv[1:])
