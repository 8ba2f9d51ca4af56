"""What a run learns of its scores' lengths: from diagnoses, kept on resume."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.advantages.weighted_baselines import (
  init_score_norms,
  observe_score_norms,
  score_norm_sums,
)
from grpojax.core.objective import advantage_fn
from grpojax.core.step import init_state
from grpojax.training.run import setup
from grpojax.training.step import diagnosis


def test_only_norm_ratio_has_them(settings_with):
  def first_norms(**changes):
    settings, params = settings_with(**changes), jnp.zeros(3)
    return setup.first_state(settings, optax.sgd(1.0), params).score_norms

  assert first_norms() is None
  assert first_norms(advantage="score_weighted") is None
  first = first_norms(advantage="norm_ratio", diagnostics__every=1)
  assert [float(x) for x in vars(first).values()] == [0, 0, 0]


@pytest.mark.slow
def test_score_weighted_gets_its_power(settings_with):
  rewards = jnp.array([[0.0, 0, 1, 3]])
  unsure = jnp.array([[1.0, 2, 3, 4]])
  loss = settings_with(advantage="score_weighted", score_power=3.0).loss
  found = advantage_fn(loss)(rewards, logit_score_sq=unsure)
  others = np.average([0, 0, 1], weights=[1, 8, 27])
  assert float(found[0, 3]) == pytest.approx(3 - others, rel=1e-5)


@pytest.mark.slow
def test_a_diagnosis_row_and_back(settings_with):
  rng = np.random.default_rng(0)
  projections = jnp.asarray(rng.normal(size=(3, 4, 5)))
  rewards = jnp.asarray(rng.random((4, 5)))
  sums = score_norm_sums(jnp.mean(projections**2, 0), rewards)
  row = {f"score_norms_{name}": x for name, x in vars(sums).items()}
  anywhere = init_state({}, optax.sgd(1.0), jax.random.key(0))
  state = anywhere.replace(score_norms=init_score_norms())
  settings = settings_with(score_norms__decay=0.25)
  update = diagnosis.make_update_group_size(settings, anywhere)
  found = update(state, {"c1": 0.0} | row).score_norms
  expected = observe_score_norms(init_score_norms(), sums, decay=0.25)
  jax.tree.map(np.testing.assert_allclose, vars(found), vars(expected))


@pytest.mark.slow
def test_a_run_learns_them_and_resumes(train_toy):
  """Killed after three steps, it goes on with the same numbers."""
  settings = {"advantage": "norm_ratio", "diagnostics.every": 2, "steps": 5}
  settings |= {"checkpoint.every": 3, "score_norms.decay": 0.5}
  whole = train_toy("whole", **settings)
  train_toy("cut", **settings | {"steps": 3})
  cut = train_toy("cut", **settings)
  rows, again = ([row for row in x if "loss" in row] for x in (whole, cut))
  names = [f"score_norms_{k}" for k in ("level", "slope", "middle")]
  told = [np.array([r[n] for n in names]) for r in rows if names[0] in r]
  assert len(told) == 3 and all(np.isfinite(x).all() for x in told)
  for a, b in zip(rows, again, strict=True):
    assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"]
  assert all(np.isfinite(row["own_gradient_mse"]) for row in rows[::2])
  assert abs(told[0][1]) > 0  # they matter to step 2, and at step 4 are kept
