"""Treatment of completions cut off at their token budget.

With p the probability that a completion ends by itself, V the mean reward of
all completions and V_e of those that end, the expected gradient of a prompt's
group under `leave_one_out` and weights of 1 / G per token (`fixed_length`) is:

| truncated | in the baseline | in the loss | expected gradient          |
|-----------|-----------------|-------------|----------------------------|
| keep      | yes             | yes         | grad V                     |
| mask      | yes             | no          | grad E[Z; ends] - V grad p |
| drop      | no              | no          | p P(another ends) grad V_e |

Token weights divide by the completions in the loss: with `mask` and `drop` by
about p (docs/objectives.md; `mask`: DAPO, arXiv 2503.14476, section 3.4).
"""

import jax.numpy as jnp

TRUNCATED = {
  "keep": lambda rewards, finished: (rewards, jnp.ones_like(finished)),
  "mask": lambda rewards, finished: (rewards, finished),
  "drop": lambda rewards, finished: (
    jnp.where(finished, rewards, jnp.nan),
    finished,
  ),
}
"""Treatments by name: (rewards, finished) -> rewards in the baseline [B, G], or
[K, B, G] of K functions, and True for samples in the loss [B, G]."""
