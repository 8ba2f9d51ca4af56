"""Mixture of experts: a router, and an MLP for each expert's tokens.

On a mesh, each device routes its own tokens. If experts are split over the axis
`expert`, the tokens of its devices are gathered, each device computes its own
experts for all of them, and the sums are scattered back. For n devices and k
experts per token this sends a token n - 1 times. An all-to-all would send it
k (n - 1) / n times, which is less only if n > k.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Integer, PyTree

from grpojax.core.losses.load_balancing import ExpertLoad
from grpojax.core.meshes import activation_spec
from grpojax.models import sharding
from grpojax.models.config import TransformerConfig

LAYER = "layer"  # name of a layer's index in a whole stack of parameters


def matrices_of(layer: Iterable[str]) -> list[str]:
  """Returns the names of the experts' matrices and adapters in a layer."""
  return [name for name in layer if name.startswith("expert_")]


def router_logits(
  x: Float[Array, "*tokens D"], router: Float[Array, "D X"]
) -> Float[Array, "*tokens X"]:
  """Returns the logits of each token's experts, in float32."""
  return jnp.matmul(
    x.astype(jnp.float32),
    router.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,  # accelerators would round inputs
  )


def route(
  x: Float[Array, "N D"],
  router: Float[Array, "D X"],
  count: int,
  normalize: bool,
  replayed: Integer[Array, "N count"] | None = None,
) -> tuple[Float[Array, "N count"], Int[Array, "N count"]]:
  """Returns the weights (float32) and indices of each token's experts.

  With `normalize`, weights sum to 1. If logits are nearly equal, rounding may
  change the chosen experts. So `replayed` may hold the experts of a rollout (Ma
  et al. 2025, arXiv 2510.11370), and the router only computes their weights.
  """
  logits = router_logits(x, router)
  if replayed is None:
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)
    if normalize:
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts
  # Unknown experts are out of range: `take_along_axis` returns NaN for them.
  experts = replayed.astype(jnp.int32)
  if normalize:
    # A quotient of probabilities could be 0 / 0 for unread tokens.
    chosen = jnp.take_along_axis(logits, experts, axis=-1)
    return jax.nn.softmax(chosen, axis=-1), experts
  probs = jax.nn.softmax(logits, axis=-1)
  return jnp.take_along_axis(probs, experts, axis=-1), experts


def expert_load(
  x: Float[Array, "B G S D"],
  router: Float[Array, "D X"],
  count: int,
  weights: Float[Array, "B G S"],
) -> ExpertLoad:
  """Returns the load of a layer's experts, with `count` experts per token.

  `weights` are the tokens' weights in the load. The router's logits are
  computed again (see `mixture`): about X / (3 k F) of a layer's work.
  """
  probs = jax.nn.softmax(router_logits(x, router), axis=-1)
  # XLA would gather tokens over a mesh for `top_k`. So compare all pairs of
  # experts, [B, G, S, X, X]: fewer than k experts come before a chosen one, and
  # ties go to the lower index.
  this = probs[..., :, None]
  other = probs[..., None, :]
  index = jnp.arange(probs.shape[-1])
  earlier = index < index[:, None]
  before = (other > this) | ((other == this) & earlier)
  chosen = jnp.sum(before, axis=-1) < count
  weights = weights[..., None]
  return ExpertLoad(
    chosen=jnp.sum(jnp.where(chosen, weights, 0.0), axis=(0, 1, 2)),
    probs=jnp.sum(weights * probs, axis=(0, 1, 2)),
    count=jnp.sum(weights),
  )


def _experts(
  x: Float[Array, "N D"],
  weights: Float[Array, "N count"],
  experts: Int[Array, "N count"],
  matrices: dict[str, Array],
  total: int,
  activation: Callable[[Array], Array],
  layer: Int[Array, ""] | None = None,
) -> Float[Array, "N D"]:
  """Returns the weighted sum of each token's experts on this device, float32.

  `experts` are indices into `matrices`; indices outside belong to other devices
  and add exactly 0. `total` is the number of experts on all devices. With an
  index `layer`, `matrices` hold all layers.
  """
  from grpojax.models import grouped  # importing Pallas is slow

  held = matrices["expert_gate"].shape[-3]
  count = experts.shape[1]
  is_held = (0 <= experts) & (experts < held)
  chosen = jnp.where(is_held, experts, held).reshape(-1)
  # Pair i of the N * count pairs (token, expert) belongs to token i // count.
  # After sorting, each expert's pairs are a run of rows. Pairs with other
  # devices' experts come last, outside of all runs.
  order = jnp.argsort(chosen)  # stable
  runs = jnp.bincount(chosen, length=held).astype(jnp.int32)
  # [N count, D]: each token once for each of its experts, sorted by expert
  rows = x[order // count]
  if held < total:  # products of rows outside of all runs are undefined
    rows = jnp.where((jnp.arange(len(rows)) < runs.sum())[:, None], rows, 0)

  of_runs = grouped.grouped_product
  if layer is not None:
    of_runs = functools.partial(grouped.layer_product, layer)
  product = lambda rows, name: of_runs(rows, matrices[name], runs)

  def multiply(rows, name):
    y = product(rows, name)
    if f"{name}_lora_a" in matrices:
      y += product(product(rows, f"{name}_lora_a"), f"{name}_lora_b")
    return y

  y = activation(multiply(rows, "expert_gate")) * multiply(rows, "expert_up")
  # The inverse permutation sorts the pairs by token again.
  y = multiply(y, "expert_down")[jnp.argsort(order)]
  y = y.reshape(*experts.shape, -1)
  if held < total:
    y = jnp.where(is_held[..., None], y, 0)
  return jnp.sum(weights[..., None] * y, axis=1)


# True if shard_map tracks the axes along which values vary. With it, jax 0.7
# has no derivative under jax.checkpoint if an argument is saved.
_TRACKED = hasattr(jax.lax, "pcast")


def _varying(x: Array, axes: set[str]) -> Array:
  """Marks x as varying along `axes`; its gradient is summed over them."""
  if axes and _TRACKED:
    x = jax.lax.pcast(x, tuple(sorted(axes)), to="varying")
  return x


def _on_device(
  config: TransformerConfig,
  activation: Callable[[Array], Array],
  row_axes: set[str],
  axes_of_matrices: dict[str, set[str]],
  x: Float[Array, "b g S D"],
  layer: dict[str, Array],
  replayed: Integer[Array, "b g S count"] | None,
) -> tuple[Float[Array, "b g S D"], Int[Array, "b g S count"]]:
  """Returns a device's part of a mixture, float32, and its tokens' experts.

  `row_axes` split the tokens, and `axes_of_matrices` the experts' matrices:
  `expert` splits X, and `tensor` splits F.
  """
  tokens = x.reshape(-1, x.shape[-1])
  count = config.experts_per_token
  if replayed is not None:
    replayed = replayed.reshape(-1, count)
  choice = count, config.normalize_experts, replayed
  weights, experts = route(tokens, layer["router"], *choice)
  chosen = experts.reshape(*x.shape[:3], count)
  # A matrix is used with tokens and matrices that are split along other axes.
  matrix_axes = set().union(*axes_of_matrices.values())
  matrices = {
    name: _varying(layer[name], (row_axes | matrix_axes) - axes)
    for name, axes in axes_of_matrices.items()
  }
  # Mark before `astype`, so that gradients are summed in float32.
  tokens, weights = (
    _varying(a, matrix_axes - row_axes) for a in (tokens, weights)
  )
  tokens = tokens.astype(layer["expert_gate"].dtype)
  is_split = "expert" in matrix_axes
  gathered = is_split and "expert" in row_axes
  # Each device sees the tokens of all devices along `expert`.
  if gathered:
    tokens, weights, experts = (
      jax.lax.all_gather(a, "expert", tiled=True)
      for a in (tokens, weights, experts)
    )
  if is_split:
    # Indices relative to the first expert of this device
    held = layer["expert_gate"].shape[-3]
    experts = experts - held * jax.lax.axis_index("expert")
  args = tokens, weights, experts, matrices, config.experts, activation
  y = _experts(*args, layer.get(LAYER))
  # Add up the experts' parts; each device keeps the sums of its own tokens.
  if gathered:
    y = jax.lax.psum_scatter(y, "expert", tiled=True)
    matrix_axes = matrix_axes - {"expert"}
  # The other axes split F, or experts whose tokens are on all devices.
  y = jax.lax.psum(y, tuple(sorted(matrix_axes))) if matrix_axes else y
  return y.reshape(x.shape), chosen


def mixture(
  config: TransformerConfig,
  x: Float[Array, "B G S D"],
  layer: dict[str, Array],
  activation: Callable[[Array], Array],
  replayed: Integer[Array, "B G S count"] | None = None,
) -> tuple[Float[Array, "B G S D"], Int[Array, "B G S count"]]:
  """Returns the weighted sum of each token's experts, and the experts' indices.

  A mixture of experts (Shazeer et al. 2017) that drops no tokens; the router
  chooses, unless experts are `replayed`. Tokens and result are not rounded.
  `layer` is gathered along fsdp (`sharding.gather`); it may hold the matrices
  of its whole stack, with its index `LAYER` (`layer_stacks.scan`).
  """
  matrices = matrices_of(layer)
  layer = {k: x for k, x in layer.items() if k in ("router", LAYER, *matrices)}
  compute = functools.partial(_on_device, config, activation)
  mesh = jax.sharding.get_abstract_mesh()
  # Axes of other types belong to the user: compute as on a single device.
  if mesh.size == 1 or set(mesh.axis_types) != {AxisType.Auto}:
    unsplit = {name: set() for name in matrices}
    return compute(set(), unsplit, x, layer, replayed)
  rows = activation_spec(mesh, x.shape, ("batch", "group"))

  def spec(name):
    if name == LAYER:
      return P()
    # A whole stack has an axis of layers in front of a layer's axes.
    if LAYER in layer and name in matrices:
      return P(None, *sharding.layer_spec(name, layer[name].shape[1:], mesh))
    return sharding.layer_spec(name, layer[name].shape, mesh)

  specs = {name: spec(name) for name in layer}
  axes_of = lambda spec: set(itertools.chain(*sharding.axes_of(spec)))
  axes_of_matrices = {name: axes_of(specs[name]) for name in matrices}
  compute = functools.partial(compute, axes_of(rows), axes_of_matrices)
  over_mesh = jax.shard_map(
    compute,
    in_specs=(rows, specs, rows),
    out_specs=(rows, rows),
    check_vma=_TRACKED,
  )
  return over_mesh(x, layer, replayed)


def join_layers(
  config: TransformerConfig, experts: tuple[Int[Array, "_ B G S count"], ...]
) -> Integer[Array, "B G S X"]:
  """Joins the experts of all layers per token, as small integers."""
  dtype = jnp.uint8 if config.experts <= 256 else jnp.uint16
  # [L, B, G, S, count] -> [B, G, S, L, count]; the last two become X.
  x = jnp.moveaxis(jnp.concatenate(experts).astype(dtype), 0, -2)
  return x.reshape(*x.shape[:3], -1)


def split_layers(config: TransformerConfig, recorded: PyTree) -> PyTree:
  """Splits arrays from `join_layers` by layer: [L, B, G, S, count]."""
  shape = config.layers, config.experts_per_token

  def split(x):
    if x.shape[-1] != math.prod(shape):
      raise ValueError(
        f"{x.shape[-1]} experts per token were recorded over all layers, but "
        f"{shape[0]} layers with {shape[1]} each need {math.prod(shape)}"
      )
    return jnp.moveaxis(x.reshape((*x.shape[:-1], *shape)), -2, 0)

  return jax.tree.map(split, recorded)
