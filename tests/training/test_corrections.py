"""Settings of corrections, of truncated completions and of penalties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.objective import correction_fn
from grpojax.core.types import Batch
from grpojax.training.config import from_config
from grpojax.training.step import batch as batch_lib

TRAINER = {"optim__epochs": 2, "loss__old_logprobs": "trainer"}


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

  def factors(**changes):
    correct = correction_fn(settings_with(**settings | changes).loss)
    return correct(jnp.zeros_like(log_ratio), batch)[0]

  # The second is 1.06 nats a token from its sampler.
  np.testing.assert_allclose(factors(), [[[0.5, 1.5]], [[0, 0]]])
  unbounded = {"loss__off_policy_threshold": 0.0, "loss__correction_high": 0.0}
  np.testing.assert_allclose(
    factors(**unbounded), [[[0.5, 4.0]], [[1.2, 0.5]]], rtol=1e-6
  )


@pytest.mark.parametrize(
  "changes, text",
  [
    (
      {"loss__correction": "tis"},
      "loss.correction = 'tis': use one of none, t",
    ),
    ({"loss__correction_low": 1.5}, "loss.correction_low = 1.5: must be in [0"),
    (
      {"loss__correction": "token_mask", "optim__epochs": 2},
      "with several updates a step and loss.old_logprobs = 'rollout' the",
    ),
    (
      {
        "loss__truncated": "drop",
        "group_size": "auto",
        "diagnostics__every": 1,
      },
      "loss.truncated = 'drop': group_size = 'auto' follows",
    ),
    ({"model__reference_every": 2}, "no reference without a KL term"),
    ({"model__reference_mix": 0.5}, "a fixed reference is not mixed"),
  ],
)
def test_what_cannot_be_is_refused(changes, text, config_with):
  with pytest.raises(ValueError) as error:
    from_config(config_with(**changes))
  assert text in str(error.value)


@pytest.mark.parametrize(
  "changes",
  [
    {"loss__correction": "token_mask", **TRAINER},
    {"loss__off_policy_threshold": 0.1, "optim__epochs": 2},
    {"loss__truncated": "mask", "reward__on_device": True},
    {
      "model__reference_every": 1,
      "model__reference_mix": 0.01,
      "loss__beta": 0.1,
      "lora__rank": 2,
    },
    {"sampling__repetition_penalty": 1.2, "sampling__slots": 2},
  ],
)
def test_what_can_be_is_not(changes, config_with):
  from_config(config_with(**changes))


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, [1, 1, 0]),
    ({"loss__truncated": "mask"}, [1, 0, 0]),
    ({"loss__truncated": "drop"}, [1, 0, 0]),
    # In the baseline with its penalty, which has to be computed.
    ({"loss__truncated": "mask", "loss__beta": 0.1}, [1, 0, 0]),
    (
      {
        "loss__truncated": "mask",
        "loss__beta": 0.1,
        "loss__kl": "k1",
        "loss__kl_placement": "reward",
      },
      [1, 1, 0],
    ),
    (
      {
        "loss__truncated": "drop",
        "loss__beta": 0.1,
        "loss__kl": "k1",
        "loss__kl_placement": "reward",
      },
      [1, 0, 0],
    ),
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
