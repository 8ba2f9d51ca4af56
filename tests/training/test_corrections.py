"""Settings of corrections, of truncated completions and of penalties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.objective import correction_fn
from grpojax.core.types import Batch
from grpojax.training.step import batch as batch_lib

IN_REWARD = {
  "loss__beta": 0.1,
  "loss__kl": "k1",
  "loss__kl_placement": "reward",
}


@pytest.mark.slow
def test_settings_reach_the_correction(settings_with):
  assert correction_fn(settings_with().loss) is None
  settings = dict(
    loss__correction="token_truncate",
    loss__correction_low=0.5,
    loss__correction_high=1.5,
    loss__off_policy_threshold=0.3,
  )
  log_ratio = jnp.log(jnp.array([[[0.2, 4.0]], [[1.2, 0.1]]]))
  mask = jnp.ones((2, 1, 2), bool)
  advantages = jnp.array([[-1.0], [-1.0]])
  batch = Batch(None, None, None, mask, advantages, None, None, -log_ratio)

  def corrected(**changes):
    correct = correction_fn(settings_with(**settings | changes).loss)
    weights, left_out, _ = correct(jnp.zeros_like(log_ratio), batch)
    return weights, left_out

  weights, left_out = corrected()
  np.testing.assert_allclose(weights, [[[0.5, 1.5]], [[1.2, 0.5]]])
  # The second is 1.06 nats a token from its sampler.
  np.testing.assert_array_equal(left_out, [[[False]], [[True]]])
  weights, left_out = corrected(
    loss__off_policy_threshold=0.0, loss__correction_high=0.0
  )
  np.testing.assert_allclose(weights, [[[0.5, 4.0]], [[1.2, 0.5]]], rtol=1e-6)
  assert left_out is None
  weights, _ = corrected(loss__correction="none")
  assert weights is None


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, [1, 1, 0]),
    ({"loss__truncated": "mask"}, [1, 0, 0]),
    ({"loss__truncated": "drop"}, [1, 0, 0]),
    # In the baseline with its penalty, which has to be computed.
    ({"loss__truncated": "mask", "loss__beta": 0.1}, [1, 0, 0]),
    (IN_REWARD | {"loss__truncated": "mask"}, [1, 1, 0]),
    (IN_REWARD | {"loss__truncated": "drop"}, [1, 0, 0]),
  ],
)
def test_what_nobody_reads_is_not_packed(
  changes, expected, settings_with, samples_of, monkeypatch
):
  planned = []
  plan = lambda lengths, *_: planned.append(lengths)
  monkeypatch.setattr(batch_lib.packing_layout, "plan", plan)
  finished = jnp.array([[True, False, True]])
  samples = samples_of(np.ones((1, 3, 2)), finished)
  rewards = np.array([[1.0, 0.0, np.nan]], np.float32)
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  batch_lib.plan_packing(settings_with(**changes), samples, rewards, mesh)
  np.testing.assert_array_equal(planned, [[2 * np.array(expected)]])
  assert jax.device_get(finished).tolist() == [[True, False, True]]
