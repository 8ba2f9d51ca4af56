"""Allocation of groups to prompts: by enumeration, and by brute force."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.advantages import leave_one_out
from grpojax.statistics import u_statistics
from grpojax.statistics.allocation import (
  allocate,
  errors_of_rates,
  relative_error,
)


def compositions(total, parts):
  """All numbers of groups, one or more a prompt."""
  for cuts in itertools.combinations(range(1, total), parts - 1):
    yield np.diff([0, *cuts, total])


@pytest.mark.parametrize("groups", [4, 7, 10])
def test_no_other_numbers_have_a_smaller_error(groups):
  rng = np.random.default_rng(groups)
  for errors in (rng.exponential(size=4) ** 3, np.array([0.0, 0, 1, 9])):
    found = allocate(errors, groups)
    assert found.sum() == groups and found.min() >= 1
    best = min((errors / m).sum() for m in compositions(groups, 4))
    assert (errors / found).sum() == pytest.approx(best, rel=1e-12)
    assert relative_error(errors, found) <= relative_error(
      errors, np.full(4, groups / 4)
    )


def test_many_groups_reach_neymans_bound():
  errors = np.array([0.1, 1.0, 4.0, 25.0])
  bound = np.mean(np.sqrt(errors)) ** 2 / np.mean(errors)
  found = relative_error(errors, allocate(errors, 4000))
  assert found == pytest.approx(bound, rel=1e-3)


def test_the_error_of_a_step_is_the_formula(float64):
  """Three prompts with one, one and two groups of 2, all listed: no bias."""
  rng = np.random.default_rng(0)
  probabilities = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
  features = rng.normal(size=(3, 2, 3))
  scores = features - np.einsum("xv,xvd->xd", probabilities, features)[:, None]
  rewards = np.array([[1.0, 0], [0, 1], [1, 0]])
  moments = [
    u_statistics.moments(*map(jnp.asarray, x))
    for x in zip(probabilities, scores, rewards, strict=True)
  ]
  errors = [m.oracle_trace / 2 + m.remainder / 2 for m in moments]
  errors = np.array(errors, np.float64)
  groups = np.array(list(itertools.product(range(2), repeat=2)))

  def of_prompt(x, count):
    """Chance and gradient of each outcome of a prompt's groups."""
    advantages = np.asarray(leave_one_out(jnp.asarray(rewards[x][groups])))
    gradients = np.einsum("ng,ngd->nd", advantages, scores[x][groups]) / 2
    chances = probabilities[x][groups].prod(-1)
    for drawn in itertools.product(range(4), repeat=count):
      yield chances[list(drawn)].prod(), gradients[list(drawn)].mean(0)

  counts = np.array([1, 1, 2])
  truth = np.einsum("xv,xvd->d", probabilities * rewards, scores) / 3
  mean, error, total = 0, 0, 0
  for step in itertools.product(*map(of_prompt, range(3), counts)):
    chance = np.prod([c for c, _ in step])
    found = sum(g for _, g in step) / 3
    mean, total = mean + chance * found, total + chance
    error += chance * ((found - truth) ** 2).sum()
  assert total == pytest.approx(1)
  np.testing.assert_allclose(mean, truth, atol=1e-14)
  assert error == pytest.approx((errors / counts).sum() / 9, rel=1e-12)


def test_errors_from_success_rates():
  """The mean over a beta posterior, by quadrature; certain rates; r = 1."""
  a, b = np.array([0.5, 3.5, 12.0]), np.array([8.5, 0.5, 4.0])
  p = (np.arange(200_000) + 0.5) / 200_000
  density = p ** (a[:, None] - 1) * (1 - p) ** (b[:, None] - 1)
  density /= density.sum(-1, keepdims=True)
  for ratio in (1.0, 0.05):
    expected = density @ (p * (1 - p) * ((1 - p) * ratio + p))
    found = errors_of_rates(a, b, ratio)
    np.testing.assert_allclose(found, expected, rtol=5e-3)
  n = a + b
  np.testing.assert_allclose(errors_of_rates(a, b), a * b / (n * (n + 1)))


def test_what_cannot_be_divided():
  with pytest.raises(ValueError, match="each of 3 prompts"):
    allocate(np.ones(3), 2)
  with pytest.raises(ValueError, match="not negative"):
    allocate(np.array([1.0, -1.0]), 4)
