"""Auxiliary loss that balances the load of a mixture's experts.

Without it, a router that favours a few experts trains only these, and favours
them more.
"""

import typing

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from grpojax.core.types import Tokens


@typing.no_type_check
@struct.dataclass
class ExpertLoad:
  """Load of each of X experts, summed over tokens and layers."""

  chosen: Float[Array, "X"]  # tokens sent to each expert
  probs: Float[Array, "X"]  # the routers' probabilities of each expert
  count: Float[Array, ""]  # tokens times layers


def with_load_weights(tokens: Tokens, mask: Bool[Array, "B G T"]) -> Tokens:
  """Adds the weight of each token in the experts' load; `mask` is the loss's.

  A prompt's token counts once per completion in the loss, however a batch is
  split or packed. Observations have weight 0; importance weights are ignored.
  """
  learned = jnp.sum(jnp.any(mask, axis=-1), axis=-1, keepdims=True)
  prompt_weights = tokens.prompt_mask * learned
  return tokens.replace(
    load_weights=mask.astype(jnp.float32),
    prompt_load_weights=prompt_weights.astype(jnp.float32),
  )


def load_balancing_loss(
  load: ExpertLoad, whole: ExpertLoad | None = None
) -> Float[Array, ""]:
  """Returns the loss X sum_x f_x P_x, or a micro-batch's share of it.

  For a micro-batch, `whole` is the load of its whole minibatch. f_x is the
  share of all tokens sent to expert x, P_x its mean probability, over tokens
  and layers together (arXiv 2101.03961, equations 4 to 6, like transformers'
  `load_balancing_loss_func`; over a whole batch: arXiv 2501.11873). With k
  experts per token the loss is k if all are used evenly, and at most X. f_x, a
  count, has no gradient.
  """
  whole = load if whole is None else whole
  count = jnp.maximum(whole.count, 1.0)
  chosen = jax.lax.stop_gradient(whole.chosen)
  return len(load.probs) * jnp.sum(chosen / count * (load.probs / count))
