"""Penalty on the length of completions, larger for solved prompts.

ALP (arXiv 2506.05256) subtracts from the reward of each completion

    reward.length_penalty * (tokens / max_new_tokens) * max(p, 1 / G),

with p the share of correct completions in its group; tokens include those of an
environment. Completions get shorter if the model answers well, and keep their
length for unsolved prompts. Groups of equal rewards may differ after the
penalty, so they cannot be replaced (`conflicts`). The diagnosis uses the
rewards before the penalty.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from grpojax.core import meshes
from grpojax.rewards.conventions import CORRECT
from grpojax.training.step import scoring
from grpojax.training.step.extension import Extension, Inputs, with_metrics

NAME = "length_penalty"


def penalties(
  shares: Float[np.ndarray, "B G"], correct: Any
) -> Float[np.ndarray, "B G"]:
  """Returns penalties for a coefficient of 1.

  `shares` are lengths divided by `max_new_tokens`; `correct` [B, G] is True for
  correct completions.
  """
  solved = np.mean(correct, axis=-1, keepdims=True)
  return shares * np.maximum(solved, 1 / shares.shape[-1])


def extension(inputs: Inputs) -> Extension | None:
  """Subtracts the penalty from a step's rewards; None without a coefficient."""
  settings = inputs.settings
  coefficient = settings.reward.length_penalty
  if not coefficient:
    return None

  def after_draw(state, drawn, context):
    del state, context
    rollout, rewards, examples, _ = drawn.batch
    right = scoring.correctness(inputs.reward_pool, rewards, examples)
    tokens = np.sum(meshes.fetch(rollout.completion_mask), axis=-1)
    shares = tokens / settings.sampling.max_new_tokens
    penalty = coefficient * penalties(shares, right >= CORRECT)
    new = rewards.rewards - penalty.astype(rewards.rewards.dtype)
    rewards = rewards._replace(rewards=new)
    batch = drawn.batch._replace(rewards=rewards)
    mean = {"length_penalty_mean": float(np.mean(penalty))}
    # All drawn groups are in the batch, so all metrics are of the same rewards.
    return with_metrics(drawn._replace(batch=batch, rewards=rewards), mean)

  return Extension(after_draw=after_draw)
