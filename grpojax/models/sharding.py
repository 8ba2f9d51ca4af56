"""Shards parameters over a mesh by a table of rules, and gathers them for use.

A rule maps the end of a path to a `PartitionSpec`. So rules also fit a
`TrainState` and optimizer state, in which paths end with parameters' names.
"""

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from grpojax.core import meshes
from grpojax.core.meshes import AXES, divide, free_axes

_FSDP = ("fsdp", "expert")  # axes to gather along; experts: only fsdp
# Matrices whose outputs, or whose inputs, are heads or an MLP's channels
_UP = "(q|k|v|gate|up|linear_(qkv|z|a|b))"
_DOWN = "(o|down|linear_o)"
RULES = (
  # (pattern for the end of the path, axes)  # shape
  (r"embed", P(("tensor", *_FSDP), _FSDP)),  # [V, D]
  (r"head", P(_FSDP, "tensor")),  # [D, V]
  (r"head_scale", P("tensor")),  # [V]
  (rf"layers/{_UP}", P(None, _FSDP, "tensor")),  # [L, D, ...]
  # Rows are split, because for columns split into odd multiples of 128, XLA:TPU
  # would use an all-reduce of the gradient instead of a reduce-scatter.
  (rf"layers/{_DOWN}", P(None, ("tensor", *_FSDP))),  # [L, ..., D]
  (rf"layers/{_UP}_(bias|scale)", P(None, "tensor")),  # [L, ...]
  # Of linear layers' heads: [L, H] and [L, C, 1, taps]
  (r"layers/linear_(rate_bias|conv)", P(None, "tensor")),
  (r"layers/router", P(None, _FSDP)),  # [L, D, X]
  # Statistics of optax's Adafactor, [L, X, D] or [L, X, F]; others are small.
  (r"v_(row|col)/layers/expert_(gate|up|down)", P(None, "expert")),
  # [L, X, D, F] and [L, X, F, D]
  (r"layers/expert_(gate|up)", P(None, "expert", "fsdp", "tensor")),
  (r"layers/expert_down", P(None, "expert", "tensor", "fsdp")),
  # Adapters, alone or attached (`lora.attach`). Experts' are [L, X, D, r] and
  # [L, X, r, F], with F and D swapped for down.
  (r"layers/expert_(gate|up)(/|_lora_)a", P(None, "expert", "fsdp")),
  (r"layers/expert_(gate|up)(/|_lora_)b", P(None, "expert", None, "tensor")),
  (r"layers/expert_down(/|_lora_)a", P(None, "expert", "tensor")),
  (r"layers/expert_down(/|_lora_)b", P(None, "expert", None, "fsdp")),
  (rf"layers/{_UP}(/|_lora_)a", P(None, _FSDP)),  # [L, D, r]
  (rf"layers/{_UP}(/|_lora_)b", P(None, None, "tensor")),  # [L, r, ..]
  (rf"layers/{_DOWN}(/|_lora_)a", P(None, "tensor")),  # [L, ..., r]
  (rf"layers/{_DOWN}(/|_lora_)b", P(None, None, _FSDP)),  # [L, r, D]
  # Small arrays that each device needs whole.
  (r"final_norm|layers/\w+_norm", P()),  # [D], [L, D] or [L, E]
  (rf"layers/{_DOWN}_(bias|scale)", P()),  # [L, D]
  (r"score", P()),  # [D, labels]
  (r"ns_coeffs", P()),  # [steps, 3], of optax.contrib.muon
)
"""Rules for `models.transformer`, its LoRA adapters and optimizer states.

Vectors and scalars without a rule (random keys, counts, step sizes) stay whole;
a matrix without a rule is an error."""


def axes_of(spec: P) -> list[tuple[str, ...]]:
  """Returns a tuple of axes for each entry of a spec."""
  return [(x,) if isinstance(x, str) else x or () for x in spec]


def _with_data(axes: tuple[str, ...]) -> tuple[str, ...]:
  """Puts the mesh axis "data" before each "fsdp", as in the mesh."""
  pairs = [("data", axis) if axis == "fsdp" else (axis,) for axis in axes]
  return tuple(itertools.chain(*pairs))


GRADIENT_RULES = tuple(
  (name, P(*map(_with_data, axes_of(spec)))) for name, spec in RULES
)
"""Rules for gradients before the optimizer, which are also split along data.

So a reduce-scatter adds them up over all devices with rows. For a split along
fsdp alone, XLA would use an all-reduce of twice the size. XLA recognises a
reduce-scatter only if the axes have the order of the mesh."""


def _spec(entries: Iterable[tuple[str, ...]]) -> P:
  """Returns the spec with these axes: the inverse of `axes_of`."""
  # A single axis is written as a string, and no axis as None.
  return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


def spec_for(
  path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules=RULES
) -> P:
  """Returns the `PartitionSpec` of an array, by the first matching rule.

  `path` is like "params/layers/q". Axes that do not divide their dimension are
  left out. Returns P() if the rule has too many dimensions (reduced optimizer
  state) or a vector has no rule; ValueError if another array has no rule.
  """
  for pattern, spec in rules:
    if not re.search(rf"(^|/)({pattern})$", path):
      continue
    if len(spec) > len(shape):
      return P()
    return _spec(divide(shape, tuple(axes_of(spec)), dict(mesh.shape)))
  if len(shape) > 1:
    raise ValueError(
      f"no sharding rule for {path} of shape {tuple(shape)}: add a rule to "
      "RULES in grpojax/models/sharding.py, or pass your own rules= (P() keeps "
      "an array whole)"
    )
  return P()


def shardings(tree: PyTree, mesh: Mesh | AbstractMesh, rules=RULES) -> PyTree:
  """Returns a `NamedSharding` for each array or abstract array of a tree."""

  def leaf_sharding(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, spec_for(name, leaf.shape, mesh, rules))

  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def placed(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
  """Returns abstract arrays with their `shardings`."""
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return jax.tree.map(place, tree, shardings(tree, mesh))


def shard_bytes(tree: PyTree) -> int:
  """Returns the bytes per device of abstract arrays with shardings."""

  def leaf_bytes(x):
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return x.dtype.itemsize * math.prod(shape)

  return sum(map(leaf_bytes, jax.tree.leaves(tree)))


def _only(spec: P, names: Collection[str]) -> P:
  return _spec(
    tuple(axis for axis in axes if axis in names) for axes in axes_of(spec)
  )


def _gathered(path: str, spec: P) -> P:
  """Returns the spec of a gathered parameter; experts stay on their devices."""
  dropped = ("fsdp",) if "/expert_" in path else _FSDP
  return _only(spec, set(AXES) - set(dropped))


def _spec_of(
  name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules=RULES
) -> P:
  """Returns the spec of an array; "layer/q" means one layer of "layers/q"."""
  if not name.startswith("layer/"):
    return spec_for(name, shape, mesh, rules)
  # Rules are for stacks: add an axis of layers, and remove its entry.
  stack = name.replace("layer/", "layers/", 1)
  return P(*spec_for(stack, (1, *shape), mesh, rules)[1:])


def layer_spec(name: str, shape: Sequence[int], mesh: AbstractMesh) -> P:
  """Returns the spec of a layer's parameter after `gather`."""
  path = f"layer/{name}"
  spec = _gathered(path, _spec_of(path, shape, mesh))
  return _only(spec, [axis for axis, n in mesh.shape.items() if n > 1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _lay_out(x: Array, spec: P, gradient_spec: P) -> Array:
  del gradient_spec
  return jax.lax.with_sharding_constraint(x, spec)


@_lay_out.defjvp
def _lay_out_jvp(spec, gradient_spec, primals, tangents):
  # A constraint is its own transpose.
  (x,), (t,) = primals, tangents
  t = jax.lax.with_sharding_constraint(t, gradient_spec)
  return _lay_out(x, spec, gradient_spec), t


def _constrain(params: PyTree, prefix: str, gathered: bool) -> PyTree:
  """Lays parameters out over the mesh, as stored (by `RULES`) or gathered."""
  mesh = jax.sharding.get_abstract_mesh()
  free = free_axes(mesh)
  if not set(AXES) & set(free):
    return params

  def constrain_leaf(path, x):
    name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
    name = re.sub(r"layers/\d+/", "layers/", name)  # without the stack's number
    spec = _spec_of(name, x.shape, mesh)
    if gathered:
      spec = _gathered(name, spec)
      return jax.lax.with_sharding_constraint(x, _only(spec, free))
    gradient_spec = _spec_of(name, x.shape, mesh, GRADIENT_RULES)
    return _lay_out(x, _only(spec, free), _only(gradient_spec, free))

  return jax.tree_util.tree_map_with_path(constrain_leaf, params)


def fsdp_shards() -> int:
  """Returns the number of shards that `gather` joins on the current mesh."""
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  return math.prod(sizes.get(axis, 1) for axis in _FSDP)


def constrain_as_stored(params: PyTree) -> PyTree:
  """Lays parameters out as stored, split along fsdp and tensor."""
  return _constrain(params, "", gathered=False)


@jax.custom_jvp
def _barrier(params: PyTree) -> PyTree:
  """Applies an `optimization_barrier` to values, not to their gradients.

  A barrier between a gradient's sum and its split would force an all-reduce.
  """
  return jax.lax.optimization_barrier(params)


@_barrier.defjvp
def _barrier_jvp(primals, tangents):
  return _barrier(*primals), *tangents


def gather(params: PyTree, prefix: str = "") -> PyTree:
  """Lays parameters out for use: whole along fsdp, split along tensor.

  `prefix` is the path of `params`, "layer/" for a layer of a stack. A
  reduce-scatter sums and splits their gradients in the dtype of the parameters.
  If every addition is rounded to bfloat16, a micro-batch's sum over 8 devices
  is off by about 0.4%, over 256 by 2%. Micro-batches have independent errors.
  """
  # The stored layout also splits the gradients (`GRADIENT_RULES`).
  params = _constrain(params, prefix, gathered=False)
  params = _constrain(params, prefix, gathered=True)
  if prefix == "layer/":  # no barrier, so that XLA:TPU can overlap gathers
    return params
  # Without a barrier, XLA would gather again in each iteration of a loop.
  return _barrier(params)


def all_but_gathered(primitive, *_, **__) -> bool:
  """`jax.checkpoint` policy that saves all values except gathered parameters.

  A policy of names (`checkpoint_name`) would still save the gathered array.
  """
  layout = "sharding_constraint", "custom_jvp_call"  # `_barrier`
  return primitive.name not in layout


# If a loop adds up the gradient of a weight that all devices read, XLA sums it
# over all devices in each iteration. With a copy of the weight per device, and
# samples [devices, rows, ...], XLA sums it once, after the loop.


def _row_axes() -> dict[str, int]:
  free = free_axes(jax.sharding.get_abstract_mesh())
  return {axis: free[axis] for axis in meshes.ROWS if axis in free}


def copy_for_rows(x: Array) -> Array:
  """Stacks copies of x, one per device if rows are split; else returns x."""
  axes = _row_axes()
  if not axes:
    return x
  unconstrained = [P.UNCONSTRAINED] * x.ndim  # x may be split along tensor
  x = jnp.broadcast_to(x, (math.prod(axes.values()), *x.shape))
  return jax.lax.with_sharding_constraint(x, P(tuple(axes), *unconstrained))


class RowShards(NamedTuple):
  """Layout of samples [B, G, ...] on the devices that rows are split over."""

  # Sizes of the mesh axes that split B, then B per device; the same for G:
  # (2, 3, 2, 2) if data = 2 splits 6 prompts and fsdp = 2 their 4 samples.
  shape: tuple[int, ...]
  order: tuple[int, ...]  # permutation that brings the mesh's axes to the front
  size: tuple[int, int]  # B and G

  def split(self, x: Array) -> Array:
    """[B, G, ...] -> [devices, rows, ...]; no row leaves its device."""
    axes = _row_axes()
    inner = x.shape[2:]
    x = x.reshape(*self.shape, *inner)
    x = jnp.moveaxis(x, self.order, range(len(self.order)))
    x = x.reshape(math.prod(axes.values()), -1, *inner)
    return jax.lax.with_sharding_constraint(x, P(tuple(axes)))

  def join(self, x: Array) -> Array:
    """[devices, rows, ...] -> [B, G, ...], the inverse of `split`."""
    inner = x.shape[2:]
    x = x.reshape(*(self.shape[i] for i in self.order), *inner)
    x = jnp.moveaxis(x, range(len(self.order)), self.order)
    return x.reshape(*self.size, *inner)


def row_shards(prompts: int, group_size: int) -> RowShards | None:
  """Returns the layout; None unless each row axis of the mesh splits B or G."""
  axes = _row_axes()
  size = prompts, group_size
  rules = (meshes.ACTIVATIONS["batch"], meshes.ACTIVATIONS["group"])
  shape = []
  index = {}
  # Each mesh axis that splits B or G becomes an axis before the quotient.
  for count, names in zip(size, divide(size, rules, axes), strict=True):
    for axis in names:
      index[axis] = len(shape)
      shape.append(axes[axis])
      count //= axes[axis]
    shape.append(count)
  if index.keys() != axes.keys():
    return None
  # The mesh's axes lead, in the order of the mesh.
  first = [index[axis] for axis in axes]
  after = (i for i in range(len(shape)) if i not in first)
  return RowShards(tuple(shape), (*first, *after), size)
