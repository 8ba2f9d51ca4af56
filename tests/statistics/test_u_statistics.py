"""Exact errors against the enumeration of all groups of a small policy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from populations import all_groups, population

from grpojax.core import advantages
from grpojax.statistics import u_statistics as u

pytestmark = pytest.mark.usefixtures("float64")
ONE_PROMPT = population(0, 1, 4, 3)


@pytest.mark.parametrize("group_size", [2, 4])
def test_leave_one_out_is_the_u_statistic(group_size):
  """Lemma 1: the mean over all pairs of (s_i - s_j)(Z_i - Z_j) / 2."""
  p, s, z = (x[0] for x in ONE_PROMPT)
  first, second = np.array(list(itertools.combinations(range(group_size), 2))).T
  index = np.array(list(itertools.product(range(4), repeat=group_size)))
  scores = s[index]
  rewards = z[index]
  differences = rewards[:, first] - rewards[:, second]
  kernels = (scores[:, first] - scores[:, second]) * differences[..., None] / 2
  weights = advantages.leave_one_out(jnp.asarray(rewards))
  result = np.einsum("ng,ngd->nd", weights, scores) / group_size
  assert_allclose(result, kernels.mean(1), atol=1e-12)
  assert_allclose(p[index].prod(-1) @ result, (p * z) @ s, atol=1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_errors_and_covariances_equal_enumeration(group_size):
  estimates, (weight,) = all_groups(*ONE_PROMPT, group_size)
  p, s, z = (x[0] for x in ONE_PROMPT)
  mse = jax.jit(lambda *x: u.mse(u.moments(*x), group_size))(p, s, z)
  covariance = jax.jit(u.covariance, static_argnums=3)(p, s, z, group_size)
  for name in u.Estimators._fields:
    (x,) = getattr(estimates, name)
    error = weight @ ((x - (p * z) @ s) ** 2).sum(-1)
    assert_allclose(getattr(mse, name), error, rtol=0, atol=1e-10)
    x = x - weight @ x
    expected = np.einsum("n,nd,ne->de", weight, x, x)
    assert_allclose(getattr(covariance, name), expected, atol=1e-10)


def test_single_sample_groups_are_refused():
  moments = u.moments(*(jnp.asarray(x[0]) for x in ONE_PROMPT))
  with pytest.raises(ValueError, match="at least 2, not 1"):
    u.mse(moments, 1)
