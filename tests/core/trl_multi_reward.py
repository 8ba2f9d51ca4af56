"""Golden values of TRL's aggregation of several rewards, for test_multi_reward.

Runs the lines of TRL's own `GRPOTrainer` that turn rewards into advantages:

    VENV-OF-TRL/bin/python tests/core/trl_multi_reward.py

Printed by trl 1.16.0 and torch 2.13.0.
"""

import inspect
import json
import textwrap
import types

import torch
from trl.trainer import grpo_trainer
from trl.trainer.utils import nanstd

NAN = float("nan")
REWARDS = [  # [B * G, K]; groups of 4
  [1.0, 0.2, 10.0],
  [0.0, 0.2, -5.0],
  [1.0, 0.7, 0.0],
  [0.0, 0.1, 2.5],
  [1.0, NAN, 3.0],
  [1.0, 0.5, NAN],
  [1.0, 0.9, -4.0],
  [1.0, NAN, 8.0],
  [NAN, NAN, NAN],
  [0.0, NAN, 1.0],
  [1.0, 0.3, NAN],
  [0.0, NAN, 7.0],
]
WEIGHTS = [1.0, 0.5, -2.0]


def advantages(aggregation, scale_rewards):
  """What TRL learns from, by its own lines."""
  source = inspect.getsource(grpo_trainer)
  start = source.index(
    "        unscorable_mask = torch.isnan(rewards_per_func)"
  )
  end = source.index("        # Slice to keep only the local part", start)
  names = {
    "torch": torch,
    "nanstd": nanstd,
    "rewards_per_func": torch.tensor(REWARDS, dtype=torch.float64),
    "num_generations": 4,
    "device": "cpu",
    "self": types.SimpleNamespace(
      multi_objective_aggregation=aggregation,
      scale_rewards=scale_rewards,
      reward_funcs=WEIGHTS,
      reward_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
    ),
  }
  exec(textwrap.dedent(source[start:end]), names)
  return [round(x, 7) for x in names["advantages"].tolist()]


if __name__ == "__main__":
  for chosen in (
    ("normalize_then_sum", "group"),
    ("sum_then_normalize", "group"),
    ("sum_then_normalize", "batch"),
    ("sum_then_normalize", "none"),
  ):
    print(*chosen, json.dumps(advantages(*chosen)))
