"""Settings that were made apart, all in one run that is resumed."""

import jax
import numpy as np
import pytest

from grpojax.models import huggingface as hf

DATA = {"batch_size": 4, "group_size": 4, "eval.num_prompts": 4}
DATA |= {"data.mixture.easy.name": "arithmetic"}
DATA |= {"data.mixture.hard.name": "arithmetic"}
DATA |= {"reward.functions": "exact_answer,length,format"}
DATA |= {"reward.weights": "1,-.1,.5"}
LOSS = {"loss.truncated": "drop", "loss.beta": 0.1, "loss.entropy_coef": 0.01}
LOSS |= {"loss.entropy_target": 9.0, "loss.top_entropy_quantile": 0.5}
LOSS |= {"loss.correction": "token_truncate", "loss.advantage_clip": 2.0}
LOSS |= {"optim.micro_batches": 2}
FOLLOWS = {"model.reference_every": 1, "model.reference_mix": 0.5}
FOLLOWS |= {"model.reference": "host"}
FILTERED = {"filter_groups.enable": True, "filter_groups.metric": "acc"}
FILTERED |= {"filter_groups.max_num_gen_batches": 3}
FILTERED |= {"filter_groups.gen_parts": 2, "lora.rank": 2}
FILTERED |= {"data.mixture.hard.rewards": "length,format"}
FILTERED |= {"reward.aggregation": "normalize_then_sum"}
FILTERED |= {"advantage": "batch_std"}
BY_DIFFICULTY = {"difficulty.priority": "varies"}
BY_DIFFICULTY |= {"difficulty.importance_weights": True}
BY_DIFFICULTY |= {"data.mixture.easy.options.size": 12}
BY_DIFFICULTY |= {"data.mixture.hard.options.size": 9}
BY_DIFFICULTY |= {"optim.epochs": 2, "optim.minibatches": 2}
BY_DIFFICULTY |= {"advantage": "score_weighted"}
BY_DIFFICULTY |= {"loss.old_logprobs": "trainer"}
BY_DIFFICULTY |= {"loss.weighting": "sequence_sum"}


@pytest.mark.parametrize(  # each is two runs
  "settings",
  [
    pytest.param(FILTERED, marks=pytest.mark.slow, id="filtered"),
    pytest.param(BY_DIFFICULTY, marks=pytest.mark.long, id="by_difficulty"),
  ],
)
def test_all_at_once_and_resumed(settings, train_toy, tmp_path):
  settings = DATA | LOSS | FOLLOWS | settings
  settings |= {"checkpoint.every": 1, "eval.every": 9}
  train_toy("parts", **settings, steps=1)
  rows = [train_toy(name, **settings, steps=2) for name in ("whole", "parts")]
  jax.tree.map(
    np.testing.assert_array_equal,
    *(hf.load_params(tmp_path / name / "model") for name in ("whole", "parts")),
  )
  steps = ([row for row in some if "loss" in row] for some in rows)
  for row, same in zip(*steps, strict=True):
    for key, value in row.items():
      assert np.isfinite(value), key
      assert "second" in key or value == same[key], key
