"""Treatment of completions cut off at their token budget.

With p the probability that a completion ends by itself, V the mean reward of
all completions and V_e of those that end, the expected gradient of a prompt's
group under `leave_one_out` and weights of 1 / G per token (`fixed_length`) is:

| truncated | in the baseline | in the loss | expected gradient          |
|-----------|-----------------|-------------|----------------------------|
| keep      | yes             | yes         | grad V                     |
| mask      | yes             | no          | grad E[Z; ends] - V grad p |
| drop      | no              | no          | p P(another ends) grad V_e |

Weights of tokens are over the completions in the loss, which divides both by
about p. (docs/objectives.md; `mask`: DAPO, arXiv 2503.14476, section 3.4.)
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Rewards = Float[Array, "*K B G"]
Samples = Bool[Array, "B G"]


def keep(rewards: Rewards, finished: Samples) -> tuple[Rewards, Samples]:
  """Keeps truncated completions in the baseline and in the loss."""
  return rewards, jnp.ones_like(finished)


def mask(rewards: Rewards, finished: Samples) -> tuple[Rewards, Samples]:
  """Keeps truncated completions in the baseline, but not in the loss."""
  return rewards, finished


def drop(rewards: Rewards, finished: Samples) -> tuple[Rewards, Samples]:
  """Drops truncated completions, as if they had no reward."""
  return jnp.where(finished, rewards, jnp.nan), finished


TRUNCATED = {"keep": keep, "mask": mask, "drop": drop}
"""Treatments by name: (rewards, finished) -> rewards in the baseline, of a
single function or of each of K, and True for samples in the loss."""
