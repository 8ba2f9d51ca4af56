"""A layer of experts: a router, and one MLP for each expert's tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def route(
  x: Float[Array, "N D"], router: Float[Array, "D X"], count: int, normalize
):
  """The experts of each token and their weights, in float32.

  Args:
    x: tokens.
    router: its matrix.
    count: experts a token.
    normalize: the weights of a token sum to 1; else to what the softmax over
      all experts gives the chosen ones.

  Returns:
    `(weights, experts)`, each [N, count].
  """
  logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
  weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)
  if normalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, experts


def mixture(config, x: Float[Array, "N D"], layer, activation):
  """Sum of each token's experts, weighted (Shazeer et al. 2017).

  Tokens are sorted by expert, so that every matrix is multiplied with a run of
  rows; no token is dropped, however uneven the runs are.

  Args:
    config: a `TransformerConfig` with experts.
    x: tokens.
    layer: the layer's parameters.
    activation: of the gate.

  Returns:
    [N, D].
  """
  count = config.experts_per_token
  weights, experts = route(x, layer["router"], count, config.normalize_experts)
  order = jnp.argsort(experts.reshape(-1))  # stable
  sizes = jnp.bincount(experts.reshape(-1), length=config.experts)
  rows = x[order // count]

  def multiply(rows, name):
    return jax.lax.ragged_dot(rows, layer[name], sizes.astype(jnp.int32))

  y = activation(multiply(rows, "expert_gate")) * multiply(rows, "expert_up")
  y = multiply(y, "expert_down")[jnp.argsort(order)]
  y = y.reshape(*experts.shape, -1)
  return jnp.einsum("nkd,nk->nd", y, weights.astype(y.dtype))
