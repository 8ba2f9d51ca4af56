"""A layer of experts: a router, and one MLP for each expert's tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpojax.models.config import TransformerConfig


def route(
  x: Float[Array, "N D"],
  router: Float[Array, "D X"],
  count: int,
  normalize: bool,
) -> tuple[Float[Array, "N count"], Int[Array, "N count"]]:
  """The experts of each token and their weights, in float32.

  Two experts' logits can be nearly equal, and only their order counts: a
  rounding error would send the token to another expert, and change its hidden
  state by far more than a rounding error.

  Args:
    x: tokens.
    router: its matrix.
    count: experts a token.
    normalize: the weights of a token sum to 1; else to what the softmax over
      all experts gives the chosen ones.

  Returns:
    `(weights, experts)`, each [N, count].
  """
  logits = jnp.matmul(
    x.astype(jnp.float32),
    router.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,  # else accelerators may round both
  )
  weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)
  if normalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, experts


def mixture(
  config: TransformerConfig,
  x: Float[Array, "N D"],
  layer: dict[str, Array],
  activation: Callable[[Array], Array],
) -> Float[Array, "N D"]:
  """Sum of each token's experts, weighted (Shazeer et al. 2017).

  Tokens are sorted by expert, so that every matrix is multiplied with a run of
  rows; no token is dropped, however uneven the runs are.

  Args:
    config: a `TransformerConfig` with experts.
    x: tokens, not rounded: the router sees them as they are.
    layer: the layer's parameters.
    activation: of the gate.

  Returns:
    [N, D], float32.
  """
  count = config.experts_per_token
  weights, experts = route(x, layer["router"], count, config.normalize_experts)
  # Pair i of the N * count pairs (token, expert) is of token i // count. Sorted
  # by expert, each expert's pairs are one run of `run_lengths` rows.
  order = jnp.argsort(experts.reshape(-1))  # stable
  run_lengths = jnp.bincount(experts.reshape(-1), length=config.experts)
  rows = x.astype(layer["expert_gate"].dtype)[order // count]

  def multiply(rows, name):
    return jax.lax.ragged_dot(rows, layer[name], run_lengths.astype(jnp.int32))

  y = activation(multiply(rows, "expert_gate")) * multiply(rows, "expert_up")
  # The inverse permutation puts the pairs back beside their tokens.
  y = multiply(y, "expert_down")[jnp.argsort(order)]
  y = y.reshape(*experts.shape, -1)
  return jnp.sum(weights[..., None] * y, axis=1)
