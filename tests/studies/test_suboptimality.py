"""Theorem 8's study: the bandit, the limit, and a small whole run."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import special, stats

from grpojax.studies import suboptimality, tabular

THETA = np.array([0.6, -0.4])


@pytest.fixture(scope="module")
def bandit():
  sizes = {"prompts": 3, "vocab": 4, "dims": 2}
  return tabular.make_problem(3, **sizes, spread=0.5, beta=0.5)


def test_population_and_objective(bandit):
  p = special.softmax(bandit.features @ THETA, -1)
  z = bandit.rewards - bandit.beta * np.log(p * p.shape[1])
  probabilities, _, rewards = tabular.population(bandit, THETA)
  assert_allclose(probabilities, p)
  assert_allclose(rewards, z)
  several = tabular.objective(bandit, np.stack([THETA, 0 * THETA]))
  assert_allclose(several, [(p * z).sum() / 3, bandit.rewards.mean()])
  theta = jnp.asarray(THETA, jnp.float32)
  values = tabular.values(bandit, theta, jnp.arange(3))
  assert_allclose(values, (p * z).sum(-1), rtol=1e-5)


def test_derivatives_equal_differences(bandit):
  gradient, hessian = tabular.derivatives(bandit, THETA)
  basis = np.eye(2)
  step = 1e-4
  for i in range(2):
    ends = THETA + step * basis[i], THETA - step * basis[i]
    rise = np.subtract(*(tabular.objective(bandit, end) for end in ends))
    assert_allclose(rise / 2 / step, gradient[i], atol=1e-8)
    turn = np.subtract(*(tabular.derivatives(bandit, e)[0] for e in ends))
    assert_allclose(turn / 2 / step, hessian[i], atol=1e-7)
    logs = [np.log(tabular.population(bandit, e)[0]) for e in ends]
    scores = tabular.population(bandit, THETA)[1][..., i]
    assert_allclose(scores, np.subtract(*logs) / 2 / step, atol=1e-7)


def test_value_baseline_does_not_minimise_the_limit():
  """The means in docs/theory.md; Assumption 2 does not hold on the bandit."""
  known = suboptimality.bandit()
  p, s, z = tabular.population(known.problem, known.optimum)
  weights = p * np.sum(s**2, -1)
  best = np.sum(weights * z, -1) / np.sum(weights, -1)  # b*(x)
  g = np.einsum("xv,xvd->xd", p * z, s)
  terms = s * (z - best[:, None])[..., None]
  second = np.einsum("xv,xvd,xve->xde", p, terms, terms)
  within = np.mean(second - g[:, :, None] * g[:, None], axis=0)
  means = []
  for size in (2, 16):
    oracle = tabular.gradient_noise(known.problem, known.optimum, size, 16)
    noise = (np.cov(g.T, bias=True) + within / size) * size / 16
    means += [mean_of_limit(known, x) for x in (noise, oracle.oracle)]
  assert np.round(means, 3).tolist() == [0.044, 0.050, 0.187, 0.193]


def mean_of_limit(known, noise):
  curvature = known.curvature
  limit = suboptimality.limit_covariance(curvature, noise, known.eta)
  return np.trace(curvature @ limit) / 2


@pytest.mark.slow
def test_optimum_in_closed_form():
  """With a parameter per logit, pi* is exp(r / beta) and Z* constant."""
  problem = tabular.make_problem(0, 1, 3, 2, spread=0.0, beta=0.5)
  problem = problem._replace(rewards=np.array([[0.0, 1.0, 0.3]]))
  theta = tabular.optimum(problem, np.zeros(2))
  weights = np.exp(problem.rewards / 0.5)
  probabilities = tabular.population(problem, theta)[0]
  assert_allclose(probabilities, weights / weights.sum())
  noise = tabular.gradient_noise(problem, theta, 4, 16)
  assert_allclose(noise.oracle, 0, atol=1e-7)
  assert_allclose(noise.leave_one_out, 0, atol=1e-7)
  assert np.linalg.eigvalsh(noise.vanilla)[0] > 1e-4


def test_the_bandit_has_a_single_maximum():
  known = suboptimality.bandit()
  for start in np.random.default_rng(0).normal(scale=2.0, size=(19, 3)):
    end = tabular.optimum(known.problem, start)
    assert_allclose(end, known.optimum, atol=1e-4)
  assert np.linalg.eigvalsh(known.curvature)[0] > 1e-4


def assert_mean(values, expected, deviation):
  """Within four standard errors."""
  error = (values.mean(0) - expected) / deviation * len(values) ** 0.5
  assert np.abs(error).max() < 4


CURVATURE = np.array([[1.0, 0.3], [0.3, 0.6]])
NOISE = np.array([[0.5, -0.2], [-0.2, 0.4]])


def test_covariance_recursion_converges_to_the_limit():
  """theta <- theta - a (H theta + noise) with a = 4 / (n + OFFSET)."""
  start = np.array([2.0, -1.0])
  m = np.outer(start, start)
  eta = 4.0
  steps = (10, 20_000)
  gaps = []
  for n in range(1, steps[-1] + 1):
    a = eta / (n + suboptimality.OFFSET)
    shrink = np.eye(2) - a * CURVATURE
    m = shrink @ m @ shrink.T + a**2 * NOISE
    if n in steps:
      gaps.append(np.trace(CURVATURE @ m) / 2)
  limit = suboptimality.limit_covariance(CURVATURE, NOISE, eta)
  assert_allclose(steps[-1] * m, limit, rtol=2e-3, atol=1e-3)
  linear = suboptimality.linear_gap(CURVATURE, NOISE, start, eta, steps)
  assert_allclose(linear, gaps)
  weights = suboptimality.chi_square_weights(CURVATURE, limit)
  half = CURVATURE @ limit / 2
  assert_allclose(weights.sum(), np.trace(half))
  assert_allclose(np.sum(weights**2), np.trace(half @ half))


@pytest.mark.parametrize(
  ("weights", "law"),
  [([0.3], stats.chi2(1, scale=0.3)), ([0.4, 0.4], stats.expon(scale=0.8))],
)
def test_chi_square_quantiles(weights, law):
  quantiles = suboptimality.chi_square_quantiles(np.array(weights), 1000)
  at = (np.arange(1000) + 0.5) / 1000
  # 200 000 draws: 4 standard errors of a distribution function.
  assert_allclose(law.cdf(quantiles), at, atol=4 * 0.5 / 200_000**0.5)
  assert_allclose(quantiles.mean(), law.mean(), rtol=0.02)


@pytest.mark.slow
def test_best_group_size_minimises_the_limit():
  known = suboptimality.bandit()

  def mean(g):
    noise = tabular.gradient_noise(known.problem, known.optimum, g, 16)
    return mean_of_limit(known, noise.leave_one_out)

  sizes = np.array([2, 5, 9])
  basis = np.stack([sizes, np.ones(3), 1 / (sizes - 1)], -1)
  c = np.linalg.solve(basis, [mean(g) for g in sizes.tolist()])
  assert_allclose(mean(4), c @ [4, 1, 1 / 3], rtol=1e-4)
  best = suboptimality.best_group_size(known)
  assert_allclose(best, 1 + np.sqrt(c[2] / c[0]), rtol=1e-3)


FLAGS = [
  "--config.runs=200",
  "--config.steps=(1,200)",
  "--config.group_sizes=(2,)",
  "--config.num_samples=4",
]
TABLES = ("results.csv", "quantiles.csv", "summary.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  directory = tmp_path_factory.mktemp("study") / "whole"
  suboptimality.main([*FLAGS, f"--run_dir={directory}"])
  return directory


@pytest.mark.slow
def test_small_study_agrees_with_theory(finished, rows_of):
  rows = rows_of(finished / "results.csv")
  assert [(r["estimator"], r["group_size"], r["n"]) for r in rows] == [
    (name, "2", n)
    for name, n in itertools.product(suboptimality.ESTIMATORS, ("1", "200"))
  ]
  last = [r for r in rows if r["n"] == "200"]
  for row in last:
    mean, low, high = (float(row[k]) for k in ("mean", "low", "high"))
    # Four standard errors, of which the interval has 1.97 on each side.
    assert abs(mean - float(row["limit_mean"])) < (high - low) / 1.97 * 2
    assert float(row["ks"]) < 1.5 * float(row["ks_band"])
  vanilla, grpo, oracle = (float(row["mean"]) for row in last)
  assert vanilla > 2 * grpo and grpo > 1.5 * oracle
  assert (finished / "suboptimality.png").stat().st_size > 10_000
  # The first step has the length eta / (1 + offset).
  known = suboptimality.bandit()
  start = np.zeros(3)
  gradient, _ = tabular.derivatives(known.problem, start)
  noise = tabular.gradient_noise(known.problem, start, 2, 4)
  length = known.eta / (1 + suboptimality.OFFSET)
  for name in suboptimality.ESTIMATORS:
    moved = np.load(finished / f"{name}_2.npy")[0] / length
    assert_mean(moved, gradient, np.sqrt(np.diag(getattr(noise, name))))


@pytest.mark.slow
def test_interrupted_study_has_the_same_results(
  finished, tmp_path, monkeypatch
):
  simulate = suboptimality.simulate
  started = []

  def interrupted(config, known, estimator, group_size):
    started.append(estimator)
    if started == ["vanilla", "leave_one_out"]:
      raise KeyboardInterrupt
    return simulate(config, known, estimator, group_size)

  monkeypatch.setattr(suboptimality, "simulate", interrupted)
  command = [*FLAGS, f"--run_dir={tmp_path / 'run'}"]
  with pytest.raises(SystemExit, match="130"):
    suboptimality.main(command)
  suboptimality.main(command)
  assert started == ["vanilla", "leave_one_out", "leave_one_out", "oracle"]
  for name in TABLES:
    text = (finished / name).read_text()
    assert (tmp_path / "run" / name).read_text() == text
