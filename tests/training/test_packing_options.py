"""Completions that a training step packs."""

import numpy as np
import pytest

from grpojax.training.step import batch as batch_lib

IN_REWARD = {"loss.beta": 0.1, "loss.kl": "k1", "loss.kl_placement": "reward"}


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, [1, 1, 0]),
    ({"loss.truncated": "mask"}, [1, 0, 0]),
    ({"loss.truncated": "drop"}, [1, 0, 0]),
    ({"loss.truncated": "mask", "loss.beta": 0.1}, [1, 0, 0]),
    # The penalty of a masked completion is part of the baseline.
    (IN_REWARD | {"loss.truncated": "mask"}, [1, 1, 0]),
    (IN_REWARD | {"loss.truncated": "drop"}, [1, 0, 0]),
  ],
)
def test_unused_completions_are_not_packed(
  changes, expected, settings_with, samples_of, one_device, monkeypatch
):
  planned = []
  plan = lambda lengths, *_: planned.append(lengths)
  monkeypatch.setattr(batch_lib.packing_layout, "plan", plan)
  samples = samples_of(np.ones((1, 3, 2)), [[True, False, True]])
  rewards = np.array([[1.0, 0.0, np.nan]], np.float32)
  settings = settings_with(**changes)
  batch_lib.plan_packing(settings, samples, rewards, one_device)
  off = settings_with(**changes, optim__packing=False)
  assert batch_lib.plan_packing(off, samples, rewards, one_device) is None
  np.testing.assert_array_equal(planned, [[2 * np.array(expected)]])
