"""Many settings together, in a run that is resumed."""

import numpy as np
import pytest
from run_helpers import assert_same_weights

SETTINGS = """
batch_size=4 group_size=4 eval.num_prompts=4 eval.every=9 checkpoint.every=1
data.mixture.easy.name=arithmetic data.mixture.hard.name=arithmetic
reward.functions=exact_answer,length,format reward.weights=1,-.1,.5
loss.truncated=drop loss.beta=0.1 loss.entropy_coef=0.01
loss.entropy_target=9.0 loss.top_entropy_quantile=0.5
loss.correction=token_truncate loss.advantage_clip=2.0 optim.micro_batches=2
model.reference_every=1 model.reference_mix=0.5 model.reference=host
filter_groups.enable=True filter_groups.metric=acc
filter_groups.max_num_gen_batches=3 filter_groups.gen_parts=2 lora.rank=2
data.mixture.hard.rewards=length,format
reward.aggregation=normalize_then_sum advantage=batch_std
"""


@pytest.mark.slow
def test_a_run_with_many_settings_resumes_exactly(train_toy, tmp_path):
  settings = dict(word.split("=") for word in SETTINGS.split())
  train_toy("parts", **settings, steps=1)
  rows = [train_toy(name, **settings, steps=2) for name in ("whole", "parts")]
  assert_same_weights(*(tmp_path / x / "model" for x in ("whole", "parts")))
  steps = ([row for row in part if "loss" in row] for part in rows)
  for row, expected in zip(*steps, strict=True):
    for key, value in row.items():
      assert np.isfinite(value), key
      assert "second" in key or value == expected[key], key
