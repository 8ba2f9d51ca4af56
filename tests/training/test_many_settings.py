"""Settings that were made apart, all in one run that is resumed."""

import jax
import numpy as np
import pytest

from grpojax import train
from grpojax.models import huggingface as hf
from grpojax.runtime.files import records

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
RUNS = {
  "filtered": DATA
  | LOSS
  | {
    "data.mixture.hard.rewards": "length,format",
    "filter_groups.enable": True,
    "filter_groups.metric": "acc",
    "filter_groups.max_num_gen_batches": 3,
    "filter_groups.gen_parts": 2,
    "reward.aggregation": "normalize_then_sum",
    "advantage": "batch_std",
    "lora.rank": 2,
    **FOLLOWS,
  },
  "by_difficulty": DATA
  | LOSS
  | FOLLOWS
  | {
    "data.mixture.easy.options.size": 12,
    "data.mixture.hard.options.size": 9,
    "difficulty.priority": "varies",
    "difficulty.importance_weights": True,
    "advantage": "score_weighted",
    "optim.epochs": 2,
    "optim.minibatches": 2,
    "loss.old_logprobs": "trainer",
    "loss.weighting": "sequence_sum",
  },
}


@pytest.mark.parametrize(  # each is two runs
  "name",
  [
    pytest.param("filtered", marks=pytest.mark.slow),
    pytest.param("by_difficulty", marks=pytest.mark.long),
  ],
)
def test_all_at_once_and_resumed(name, toy_task, toy_model, tmp_path):
  settings = RUNS[name] | {"checkpoint.every": 1, "eval.every": 9}

  def go(directory, steps):
    words = toy_task.arguments(toy_model, **settings, steps=steps)
    train.main([*words, f"--run_dir={tmp_path / directory}"])

  go("whole", 2)
  go("parts", 1)
  go("parts", 2)
  models, rows = zip(
    *(
      (
        hf.load_params(tmp_path / x / "model"),
        records.read_jsonl(tmp_path / x / "metrics.jsonl"),
      )
      for x in ("whole", "parts")
    ),
    strict=True,
  )
  jax.tree.map(np.testing.assert_array_equal, *models)
  for row, same in zip(
    *([r for r in some if "loss" in r] for some in rows), strict=True
  ):
    for key, value in row.items():
      assert np.isfinite(value), key
      assert "second" in key or value == same[key], key
