"""Errors of batches against enumeration, and best group sizes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from populations import all_groups, population

from grpojax.statistics import group_size
from grpojax.statistics import u_statistics as u

# Prompts, completions per prompt, parameters.
X = 2
M = 3
D = 2


def enumerated(p, s, z, b, estimates, chance):
  """Computes the errors of all estimators over every batch of b groups."""
  truth = np.einsum("xm,xm,xmd->d", p, z, s) / X
  chance = chance.reshape(-1) / X
  index = np.array(list(itertools.product(range(len(chance)), repeat=b)))
  errors = []
  for x in estimates:
    mean = x.reshape(-1, D)[index].mean(1)
    errors.append(chance[index].prod(1) @ ((mean - truth) ** 2).sum(-1))
  return errors


@pytest.mark.slow
@pytest.mark.parametrize(("b", "g"), [(1, 3), (3, 2)])
def test_mse_of_a_batch_equals_enumeration(b, g, float64):
  everything = population(1, X, M, D)
  args = [*map(jnp.asarray, everything)]
  c = group_size.components(u.moments(*args), u.policy_gradient(*args))
  curve = group_size.mse_curve(c, g, b * g)
  expected = enumerated(*everything, b, *all_groups(*everything, g))
  assert_allclose(curve, expected, atol=1e-10)


@pytest.mark.parametrize(
  ("draws", "g"),
  [(1, 3), (2, 2), (3, 2), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_mse_of_epochs_of_a_finite_set_equals_enumeration(draws, g, float64):
  many = 3
  p, s, z = population(2, many, 2, D)
  estimates, chance = all_groups(p, s, z, g)
  estimates = estimates.leave_one_out
  truth = np.einsum("xm,xm,xmd->d", p, z, s) / many
  errors = []
  for extra in itertools.combinations(range(many), draws % many):
    drawn = [*range(many)] * (draws // many) + [*extra]
    groups = range(chance.shape[1])
    index = np.array(list(itertools.product(groups, repeat=draws)))
    mean = sum(estimates[x][index[:, i]] for i, x in enumerate(drawn)) / draws
    probabilities = [chance[x][index[:, i]] for i, x in enumerate(drawn)]
    probability = np.prod(probabilities, axis=0)
    errors.append(probability @ ((mean - truth) ** 2).sum(-1))
  p, s, z = map(jnp.asarray, (p, s, z))
  c = group_size.components(u.moments(p, s, z), u.policy_gradient(p, s, z))
  curve = group_size.mse_curve(c, g, draws * g, prompts=many)
  assert_allclose(curve.leave_one_out, np.mean(errors), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("c3", [0.5, 400.0])
@pytest.mark.parametrize("steps", [1, 40])
def test_best_group_size_in_epochs(c3, steps, float64):
  c = group_size.Components(1.0, 7.0, c3, 9.0, 2.0)
  n = 240 * steps
  prompts = 300
  sizes = np.geomspace(2, n, 200_001)
  errors = group_size.mse_curve(c, sizes, n, prompts).leave_one_out
  best = group_size.optimal_group_size(prompts / (prompts - 1), 7.0, c3)
  least = sizes[np.argmin(errors)]
  assert_allclose(max(best, n / prompts, 2.0), least, rtol=1e-3)


@pytest.mark.parametrize("cost", [0, 0.5, 300])
@pytest.mark.parametrize(
  "c", [(1.0, 50.0, 200.0), (3.0, 0.0, 1.0), (0.1, 20.0, 0.5), (1.0, 1.0, 9e4)]
)
def test_optimal_group_size_minimises_the_cost(c, cost, float64):
  c1, c2, c3 = c
  best = group_size.optimal_group_size(c1, c2, c3, cost)

  def error(g):
    return (cost + g) * (c1 + c2 / g + c3 / (g * (g - 1)))

  grid = 1 + np.geomspace(1e-2, 1e4, 200_001)
  assert_allclose(best, grid[error(grid).argmin()], rtol=2e-4)


def test_optimal_group_size_at_the_limits():
  best = group_size.optimal_group_size
  sizes = jax.jit(best)(jnp.array([0.0, -1.0, 1.0, 1.0]), 1.0, jnp.zeros(4))
  assert_array_equal(sizes, [jnp.inf, jnp.inf, 1, 1])
  assert best(1.0, 0.1, 0.0, 3.0) == 1  # the cost of prompts is too small
  for unknown in ((np.nan, 1.0, 1.0), (1.0, np.nan, 1.0), (1.0, 1.0, np.nan)):
    assert np.isnan(best(*unknown))
  with pytest.raises(ValueError, match="prompt_cost = -1: give 0 or more"):
    best(1.0, 1.0, 1.0, -1)
  with pytest.raises(ValueError, match="at least 2"):
    c = group_size.Components(*jnp.ones(5))
    group_size.mse_curve(c, np.array([1, 2]), 8)


def follow(estimates, start=8, error=0.0, **changes):
  """Returns the group sizes after each of these estimates (c1, c3)."""
  settings = {"smallest": 4, "largest": 64, "decay": 0.5, "margin": 0.25}
  settings |= {"confidence": 1.0} | changes
  observe = jax.jit(functools.partial(group_size.observe, **settings))
  choice = group_size.init_choice(start)
  sizes = []
  error = jnp.float32(error)
  for c1, c3 in estimates:
    c1 = jnp.float32(c1)
    c3 = jnp.float32(c3)
    choice = observe(choice, c1, error, c3, error)
    sizes.append(int(choice.group_size))
  return sizes


UP = (2.0**3.70 - 1) ** 2  # c3 for c1 = 1 and G* = 2^3.70
DOWN = (2.0**2.30 - 1) ** 2


@pytest.mark.parametrize(
  "estimates, sizes, changes",
  [
    ([(1.0, 31.0**2)] * 4, [16, 32, 32, 32], {}),
    ([(1.0, 9.0)] * 4, [32, 16, 8, 4], {"start": 64}),
    ([(1.0, 1e6)] * 5, [16, 32, 64, 64, 64], {}),
    ([(1.0, 0.01)] * 3, [4, 4, 4], {}),
    ([(-1.0, 5.0)] * 2, [16, 32], {}),  # prompts do not differ
    # Within its margin G does not move.
    ([(1.0, UP), (1.0, DOWN)] * 3, [8] * 6, {"decay": 0.0}),
    ([(1.0, (2.0**3.80 - 1) ** 2)], [16], {}),
    ([(1.0, UP)], [16], {"margin": 0.0}),
    # Estimates add up: the sums of c1 are 4, then 1 or 2.6.
    ([(4.0, 200.0), (-1.0, 200.0)], [8, 16], {}),
    ([(4.0, 200.0), (-1.0, 200.0)], [8, 8], {"decay": 0.9}),
    ([(4.0, 200.0), (jnp.nan, 1.0), (1.0, jnp.inf)], [8, 8, 8], {}),
    ([(0.0, 0.0)], [8], {}),  # no signal at all
  ],
)
def test_group_size_follows_the_estimates(estimates, sizes, changes):
  assert follow(estimates, **changes) == sizes


def test_noisy_estimate_moves_only_when_repeated():
  """K = (8 2^0.75 - 1)^2 = 155.4; evidence (400 - K)/sqrt(1 + K^2)/error."""
  limit = (400 - 155.4) / np.sqrt(1 + 155.4**2)
  seen = [(1.0, 400.0)]
  assert follow(seen, error=0.99 * limit) == [16]
  assert follow(seen, error=1.01 * limit) == [8]
  assert follow(seen, error=1.01 * limit, confidence=0.9) == [16]
  # Twice, decay 1/2: sums 1.5 times as large, errors sqrt(1.25) times.
  limit *= 1.5 / np.sqrt(1.25)
  assert follow(seen * 2, error=0.99 * limit) == [8, 16]
  assert follow(seen * 2, error=1.01 * limit) == [8, 8]
