"""Distribution of the gap to the optimum after GRPO runs, and its theory.

    python -m grpojax.studies.suboptimality [--config.key=value ...]

Theorem 8 and Corollaries 9 and 10 of arXiv 2603.01162 on a bandit of which
everything is known (`studies.tabular`). Thousands of complete GRPO runs, with
step sizes eta / n, are vmapped over seeds in one program for each estimator and
group size G, at N = B G samples a step. n times their suboptimality gap is
compared with the weighted sum of chi-squares that the theory predicts from the
curvature and the gradient noise at the optimum, without a fitted constant:

  sqrt(n) (theta_n - theta*) -> N(0, S),
  n (J* - J(theta_n)) -> 1/2 sum_k lambda_k chi2_1,

lambda the eigenvalues of H^1/2 S H^1/2, H the curvature -grad^2 J(theta*). What
theory predicts is computed in float64.

Writes results.csv (a row for each estimator, G and n), quantiles.csv,
distances.csv, summary.json and suboptimality.png. An interrupted study goes on
after the last estimator it finished.
"""

import functools
import itertools
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy  # scipy.linalg and scipy.stats come when first used
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from grpojax.core.random_keys import seed_key
from grpojax.core.step import init_state
from grpojax.core.types import Prompts, TrainState
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run, tabular

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of quantiles.csv
_CHUNK = 500  # steps between two lines of progress
# Name in the picture, and colour.
ESTIMATORS = {
  "vanilla": ("vanilla", "C3"),
  "leave_one_out": ("GRPO", "C0"),
  "oracle": ("oracle", "C2"),
}
PROBLEM = {
  "seed": 0,
  "prompts": 8,
  "vocab": 4,
  "dims": 3,
  "spread": 0.5,
  "beta": 0.5,
}
"""The bandit, see `tabular.make_problem`."""
OFFSET = 20  # step sizes are eta / (n + OFFSET)

FLAGS = run.FLAGS
SETTINGS = run.settings(
  "suboptimality",
  seed=run.SEED,
  runs=setting(
    3000, "independent GRPO runs for each estimator and G", within="[2, inf)"
  ),
  steps=setting((100, 500, 2000), "n, at which the gap is measured"),
  num_samples=setting(16, "N = B G completions a step"),
  group_sizes=setting((2, 4, 8, 16), "group sizes G"),
)


def config_errors(config: ConfigDict) -> list[str]:
  """Lists what is wrong with values that are in their ranges."""
  errors = []
  for name, least in (("steps", 1), ("group_sizes", 2)):
    values = config[name]
    whole = values and all(type(x) is int for x in values)
    if not whole or values[0] < least or sorted(set(values)) != list(values):
      remedy = f"must be increasing whole numbers, {least} or more"
      errors.append(config_error(name, values, remedy))
  if errors:
    return errors
  odd_sizes = [g for g in config.group_sizes if config.num_samples % g]
  if config.num_samples < 1 or odd_sizes:
    remedy = (
      f"must be a positive multiple of every group size, not of {odd_sizes}"
    )
    errors.append(config_error("num_samples", config.num_samples, remedy))
  return errors


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


class Bandit(NamedTuple):
  """The bandit and its optimum: all that theory needs.

  The numerator of the step sizes, eta, is 1 / the smallest curvature; the 1/n
  rate needs more than half of that.
  """

  problem: tabular.Problem
  optimum: Float[np.ndarray, "d"]  # theta*
  curvature: Float[np.ndarray, "d d"]  # H = -grad^2 J(theta*)
  eta: float
  best: float  # J*


class Outcome(NamedTuple):
  """One estimator at one group size, all in units of n times the reward."""

  gaps: Float[np.ndarray, "S R"]  # n (J* - J(theta_n)) of each n and run
  limit: Float[np.ndarray, "Q"]  # quantiles of the limit distribution
  limit_mean: float
  linear_mean: Float[np.ndarray, "S"]  # for each n if J were quadratic
  bands: tuple[float, float]  # 95% of the KS and W1 that chance makes


Outcomes = Mapping[tuple[str, int], Outcome]
"""Outcomes by estimator and group size."""


def bandit() -> Bandit:
  """Makes the bandit, and finds its optimum."""
  problem = tabular.make_problem(**PROBLEM)
  optimum = tabular.optimum(problem)
  curvature = -tabular.derivatives(problem, optimum)[1]
  eta = float(1.0 / np.linalg.eigvalsh(curvature)[0])
  best = float(tabular.objective(problem, optimum))
  return Bandit(problem, optimum, curvature, eta, best)


def make_advance(
  config: ConfigDict, known: Bandit, estimator: str, group_size: int
) -> tuple[Callable, tuple[TrainState, Array]]:
  """Makes one program of all runs of an estimator.

  Returns:
    `advance(runs, steps) -> runs`, compiled once for any number of steps, and
    the runs before their first step: training states and the keys that their
    prompts are drawn with, each with a leading axis of runs.
  """
  tx = optax.sgd(lambda count: known.eta / (count + 1 + OFFSET))
  step = tabular.make_step(known.problem, estimator, group_size, tx)
  reference = tabular.policy(known.problem).init(seed_key(0))
  shape = (config.num_samples // group_size, 1)

  def one_step(state, key):
    key = jax.random.fold_in(key, state.step)
    ids = jax.random.randint(key, shape, 0, PROBLEM["prompts"])
    prompts = Prompts(ids, jnp.ones(shape, bool))
    return step(state, prompts, reference)[0]

  def advance(runs, steps):
    states, keys = runs
    states = jax.lax.fori_loop(
      0, steps, lambda _, states: jax.vmap(one_step)(states, keys), states
    )
    return states, keys

  # A name of its own for each, so that no two estimators share samples.
  stream = zlib.crc32(f"{estimator} {group_size}".encode()) % 2**31
  key = jax.random.fold_in(seed_key(config.seed), stream)
  keys = jax.random.split(key, (2, config.runs))
  states = jax.vmap(lambda key: init_state(reference, tx, key))(keys[0])
  return jax.jit(advance, donate_argnums=0), (states, keys[1])


def simulate(
  config: ConfigDict, known: Bandit, estimator: str, group_size: int
) -> Float[np.ndarray, "S R d"]:
  """Makes the runs, with progress; their parameters at each of config.steps."""
  advance, runs = make_advance(config, known, estimator, group_size)
  began, step, snapshots = time.perf_counter(), 0, []
  for n in config.steps:
    while step < n:
      chunk = min(_CHUNK, n - step)
      runs = advance(runs, chunk)
      step += chunk
      params = np.asarray(runs[0].params, float)
      print(
        f"{estimator} G={group_size}: step {step}/{config.steps[-1]}, "
        f"{records.duration(time.perf_counter() - began)}",
        flush=True,
      )
    snapshots.append(params)
  return np.stack(snapshots)


def outcome(
  config: ConfigDict,
  known: Bandit,
  estimator: str,
  group_size: int,
  gaps: Float[np.ndarray, "S R"],
) -> Outcome:
  """Puts what theory predicts beside the runs' gaps."""
  noise = getattr(
    tabular.gradient_noise(
      known.problem, known.optimum, group_size, config.num_samples
    ),
    estimator,
  )
  h, eta = known.curvature, known.eta
  covariance = limit_covariance(h, noise, eta)
  weights = chi_square_weights(h, covariance)
  limit = chi_square_quantiles(weights)
  linear = linear_gap(h, noise, -known.optimum, eta, OFFSET, config.steps)
  return Outcome(
    gaps,
    limit,
    limit_mean=float(weights.sum()),
    linear_mean=linear * np.array(config.steps),
    bands=null_bands(limit, config.runs),
  )


def best_group_size(known: Bandit) -> float:
  """Group size that minimises the mean of the limit at N samples a step.

  The mean is linear in the noise, so it has the form a1 G + a2 + a3 / (G - 1)
  of Proposition 3 with weights of its own, and its minimum at
  1 + sqrt(a3 / a1) whatever N is.
  """

  def mean(estimator, g):
    noise = tabular.gradient_noise(known.problem, known.optimum, g, 1)
    s = limit_covariance(known.curvature, getattr(noise, estimator), known.eta)
    return chi_square_weights(known.curvature, s).sum()

  a1 = max(mean("oracle", 3) - mean("oracle", 2), 0.0)
  a3 = mean("leave_one_out", 2) - mean("oracle", 2)
  return float(1 + np.sqrt(a3 / a1)) if a1 else float("inf")


def tables(steps: tuple[int, ...], outcomes: Outcomes) -> dict[str, list[dict]]:
  """Rows of the CSV files, by file name."""
  rows = {"results": [], "quantiles": [], "distances": []}

  def apart(end, *samples):
    names = f"ks{end}", f"w1{end}"
    return dict(zip(names, distances(*samples), strict=True))

  def add(table, label, numbers):
    rows[table].append(label | run.rounded(numbers, 5))

  for (estimator, g), result in outcomes.items():
    label = {"estimator": estimator, "group_size": g}
    oracle, bands = outcomes["oracle", g].limit, result.bands
    for n, gaps, linear in zip(
      steps, result.gaps, result.linear_mean, strict=True
    ):
      mean, low, high = mean_interval(gaps)
      numbers = {"mean": mean, "low": low, "high": high}
      numbers |= {"limit_mean": result.limit_mean, "linear_mean": linear}
      numbers |= apart("", gaps, result.limit)
      numbers |= {"ks_band": bands[0], "w1_band": bands[1]}
      numbers |= apart("_to_oracle_limit", gaps, oracle)
      add("results", label | {"n": n}, numbers)
    for level in LEVELS:
      numbers = {
        "runs": np.quantile(result.gaps[-1], level),
        "limit": np.quantile(result.limit, level),
      }
      add("quantiles", label | {"level": level}, numbers)
  for (a, result), (b, other) in itertools.combinations(outcomes.items(), 2):
    label = {"a": f"{a[0]} {a[1]}", "b": f"{b[0]} {b[1]}"}
    runs = apart("_runs", result.gaps[-1], other.gaps[-1])
    add("distances", label, runs | apart("_limits", result.limit, other.limit))
  return rows


def draw(
  path: pathlib.Path, steps: tuple[int, ...], outcomes: Outcomes
) -> None:
  """Draws the distributions, their means against G, and convergence in n."""
  sizes = sorted({g for _, g in outcomes})
  with run.picture(path, 1, 3, 4.2) as axes:
    _distributions(axes[0, 0], sizes[0], steps[-1], outcomes)
    _means(axes[0, 1], sizes, steps[-1], outcomes)
    _convergence(axes[0, 2], steps, outcomes)


def _distributions(axis, g, n, outcomes) -> None:
  """Draws the share of runs above each gap: theory a line, runs points."""
  for estimator, (name, colour) in ESTIMATORS.items():
    result = outcomes[estimator, g]
    tail = 1 - (np.arange(len(result.limit)) + 0.5) / len(result.limit)
    axis.plot(result.limit, tail, colour, lw=1)
    gaps = np.sort(result.gaps[-1])
    tail = 1 - (np.arange(len(gaps)) + 0.5) / len(gaps)
    points = np.unique(
      np.searchsorted(-tail, -np.geomspace(1, 0.5 / len(gaps), 40))
    )
    points = points[points < len(gaps)]
    axis.plot(gaps[points], tail[points], f"{colour}o", ms=3, label=name)
  axis.set(
    yscale="log",
    xlabel=f"n x gap, n = {n}, G = {g}",
    ylabel="share of runs above",
    title="Runs (points), theory (lines)",
  )
  axis.set_xlim(left=0)
  axis.legend(frameon=False)


def _intervals(axis, x, gaps, colour, label) -> None:
  mean = gaps.mean(-1)
  half = 1.96 * gaps.std(-1, ddof=1) / np.sqrt(gaps.shape[-1])
  axis.errorbar(x, mean, half, fmt=f"{colour}o", ms=3, capsize=2, label=label)


def _means(axis, sizes, n, outcomes) -> None:
  for estimator, (name, colour) in ESTIMATORS.items():
    of_size = [outcomes[estimator, g] for g in sizes]
    axis.plot(sizes, [result.limit_mean for result in of_size], colour, lw=1)
    gaps = np.array([result.gaps[-1] for result in of_size])
    _intervals(axis, sizes, gaps, colour, name)
  axis.set_xscale("log", base=2)
  axis.set_xticks(sizes, map(str, sizes))
  axis.set(
    xlabel="group size G, equal samples a step",
    ylabel=f"mean of n x gap, n = {n}",
    title="Means (95%), limit (lines)",
  )
  axis.set_ylim(bottom=0)


def _convergence(axis, steps, outcomes) -> None:
  """Draws the mean over G of the ratio to the limit, for each estimator."""
  steps = np.array(steps)
  shifts = dict(zip(ESTIMATORS, (0.93, 1, 1.07), strict=True))
  for estimator, (_, colour) in ESTIMATORS.items():
    shift = shifts[estimator]
    of_size = [x for (name, _), x in outcomes.items() if name == estimator]
    ratio = np.array([result.gaps / result.limit_mean for result in of_size])
    _intervals(axis, steps * shift, ratio.mean(0), colour, None)
    linear = [result.linear_mean / result.limit_mean for result in of_size]
    axis.plot(steps * shift, np.mean(linear, 0), f"{colour}--", lw=1)
  axis.axhline(1, color="black", lw=1)
  axis.set(
    xscale="log",
    xlabel="n, steps",
    ylabel="mean of n x gap / mean of the limit",
    title="Convergence (dashed: if quadratic)",
  )
  axis.minorticks_off()
  axis.set_xticks(steps, map(str, steps))


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after its name."""
  with run.study(argv, SETTINGS, config_errors, __doc__) as (config, directory):
    began, known, outcomes = time.perf_counter(), bandit(), {}
    for estimator, g in itertools.product(ESTIMATORS, config.group_sizes):
      params = run.load_or_make(
        directory / f"{estimator}_{g}.npy",
        functools.partial(simulate, config, known, estimator, g),
      )
      gaps = known.best - tabular.objective(known.problem, params)
      gaps *= np.array(config.steps)[:, None]  # n (J* - J(theta_n))
      outcomes[estimator, g] = outcome(config, known, estimator, g, gaps)
    rows = tables(config.steps, outcomes)
    run.write_tables(directory, **rows)
    best = best_group_size(known)
    summary = {
      "theta_star": list(known.optimum),
      "curvature": list(np.linalg.eigvalsh(known.curvature)),
      "eta": known.eta,
      "best_group_size": best,
      "results": [r for r in rows["results"] if r["n"] == config.steps[-1]],
    }
    records.write_json(directory / "summary.json", summary)
    draw(directory / "suboptimality.png", config.steps, outcomes)
    for row in summary["results"]:
      print(
        "{estimator:15} G={group_size:<3} n x gap {mean:.4f} [{low:.4f}, "
        "{high:.4f}], limit {limit_mean:.4f}; KS {ks:.4f} (chance "
        "{ks_band:.4f}), W1 {w1:.4f} ({w1_band:.4f})".format(**row)
      )
    print(f"GRPO's limit is smallest at G = {best:.2f}")
    print(f"{directory}, {records.duration(time.perf_counter() - began)}")


if __name__ == "__main__":
  main(sys.argv[1:])
