import pytest

import grpojax


def test_public_names_come_from_core_statistics_and_models():
  assert len(grpojax.__all__) >= 22 and set(grpojax.__all__) <= set(
    dir(grpojax)
  )
  for name in grpojax.__all__:
    assert getattr(grpojax, name).__name__.rpartition(".")[2] == name
  assert callable(grpojax.rollout) and callable(grpojax.losses.grpo_loss)
  assert grpojax.core.batch.make_batch is grpojax.make_batch
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    _ = grpojax.nothing
  parts = {module.split(".")[1] for module in grpojax._NAMES}
  assert parts == {"core", "statistics", "models"}
