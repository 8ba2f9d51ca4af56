"""Shardings of parameters over a mesh: one table, and gathering where used.

The table maps the end of a parameter's path to a `PartitionSpec`, so it fits
parameters, a `TrainState`, and optimizer state that mirrors the parameters.
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

from grpojax.core import mesh as mesh_lib
from grpojax.core.mesh import AXES, divide, free_axes

_FSDP = ("fsdp", "expert")  # axes to gather along; experts stay in place
RULES = (
  # (pattern matched against the end of the path, axes); shapes beside them
  (r"embed", P(("tensor", *_FSDP), _FSDP)),  # [V, D]
  (r"head", P(_FSDP, "tensor")),  # [D, V]
  (r"head_scale", P("tensor")),  # [V]
  (r"layers/(q|k|v|gate|up)", P(None, _FSDP, "tensor")),  # [L, D, ...]
  # Along their rows: XLA:TPU makes no reduce-scatter, but an all-reduce, of a
  # gradient whose columns are split into odd multiples of 128.
  (r"layers/(o|down)", P(None, ("tensor", *_FSDP))),  # [L, ..., D]
  (r"layers/(q|k|v|gate|up)_(bias|scale)", P(None, "tensor")),  # [L, ...]
  (r"layers/router", P(None, _FSDP)),  # [L, D, X]
  # optax's Adafactor, [L, X, D] or [L, X, F]; its other statistics are small.
  (r"v_(row|col)/layers/expert_(gate|up|down)", P(None, "expert")),
  # [L, X, D, F] and [L, X, F, D]
  (r"layers/expert_(gate|up)", P(None, "expert", "fsdp", "tensor")),
  (r"layers/expert_down", P(None, "expert", "tensor", "fsdp")),
  # Adapters, alone or in a layer (`lora.attach`). Experts': [L, X, D, r] and
  # [L, X, r, F], or with F and D swapped for down.
  (r"layers/expert_(gate|up)(/|_lora_)a", P(None, "expert", "fsdp")),
  (r"layers/expert_(gate|up)(/|_lora_)b", P(None, "expert", None, "tensor")),
  (r"layers/expert_down(/|_lora_)a", P(None, "expert", "tensor")),
  (r"layers/expert_down(/|_lora_)b", P(None, "expert", None, "fsdp")),
  (r"layers/(q|k|v|gate|up)(/|_lora_)a", P(None, _FSDP)),  # [L, D, r]
  (r"layers/(q|k|v|gate|up)(/|_lora_)b", P(None, None, "tensor")),  # [L, r, ..]
  (r"layers/(o|down)(/|_lora_)a", P(None, "tensor")),  # [L, ..., r]
  (r"layers/(o|down)(/|_lora_)b", P(None, None, _FSDP)),  # [L, r, D]
  # These stay whole: they are small, and each device needs all of them.
  (r"final_norm|layers/\w+_norm", P()),  # [D], [L, D] or [L, E]
  (r"layers/(o|down)_(bias|scale)", P()),  # [L, D]
  (r"score", P()),  # [D, labels]
  (r"ns_coeffs", P()),  # [steps, 3], of optax.contrib.muon
)
"""Rules for `models.transformer`, its LoRA adapters and its optimizers' state.

Vectors and scalars without a rule (keys, counts, step sizes) stay whole. A
matrix without a rule is refused: held whole on every device, it would silently
cost the memory that the mesh is meant to save."""


def axes_of(spec: P) -> list[tuple[str, ...]]:
  """Returns the axes of each entry of a spec."""
  return [(x,) if isinstance(x, str) else x or () for x in spec]


def _with_data(axes: tuple[str, ...]) -> tuple[str, ...]:
  """Returns a rule's axes, with data before fsdp, in the order of the mesh."""
  pairs = [("data", axis) if axis == "fsdp" else (axis,) for axis in axes]
  return tuple(itertools.chain(*pairs))


GRADIENT_RULES = tuple(
  (name, P(*map(_with_data, axes_of(spec)))) for name, spec in RULES
)
"""Rules for gradients until the optimizer takes them: split along data as well.

One reduce-scatter adds them up over all devices with rows. Split along fsdp
alone, XLA makes a twice as large all-reduce; it recognises a reduce-scatter
only with the axes in the order of the mesh."""


def _spec(entries: Iterable[tuple[str, ...]]) -> P:
  """Returns a spec of these axes, the inverse of `axes_of`."""
  return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


def spec_for(
  path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules=RULES
) -> P:
  """Returns the `PartitionSpec` of one array, by the first rule that matches.

  `path` joins the names from the root by "/": "params/layers/q". `rules` are
  pairs of a pattern, matched against the end of the path, and axes; axes that
  do not divide their dimension are left out. P() if the rule has more
  dimensions than the array (reduced optimizer state), and for vectors and
  scalars without a rule; ValueError for larger arrays without a rule.
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
      "RULES in grpojax/models/sharding.py, or give rules= of your own (P() "
      "keeps an array whole)"
    )
  return P()


def shardings(tree: PyTree, mesh: Mesh | AbstractMesh, rules=RULES) -> PyTree:
  """Returns a `NamedSharding` for each array of any tree, by `spec_for`.

  The tree has arrays or `jax.ShapeDtypeStruct`s, for example a `TrainState`.
  """

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, spec_for(name, leaf.shape, mesh, rules))

  return jax.tree_util.tree_map_with_path(one, tree)


def placed(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
  """Returns abstract arrays with their `shardings`."""
  one = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  return jax.tree.map(one, tree, shardings(tree, mesh))


def shard_bytes(tree: PyTree) -> int:
  """Returns the bytes on each device of abstract arrays with shardings."""

  def one(x):
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    size = 8  # of a random key
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      size = jnp.dtype(x.dtype).itemsize
    return size * math.prod(shape)

  return sum(map(one, jax.tree.leaves(tree)))


def _only(spec: P, names: Collection[str]) -> P:
  return _spec(
    tuple(axis for axis in axes if axis in names) for axes in axes_of(spec)
  )


def _gathered(path: str, spec: P) -> P:
  """Returns a parameter's spec in use; experts stay where they are."""
  dropped = ("fsdp",) if "/expert_" in path else _FSDP
  return _only(spec, set(AXES) - set(dropped))


def _spec_of(
  name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules=RULES
) -> P:
  """Returns `spec_for`; "layer/q" is one layer of "layers/q"."""
  if not name.startswith("layer/"):
    return spec_for(name, shape, mesh, rules)
  stack = name.replace("layer/", "layers/", 1)
  return P(*spec_for(stack, (1, *shape), mesh, rules)[1:])


def layer_spec(name: str, shape: Sequence[int], mesh: AbstractMesh) -> P:
  """Returns the spec of a parameter of one layer, as `gather` leaves it."""
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
  """Lays parameters out over the mesh in context: by the table or gathered."""
  mesh = jax.sharding.get_abstract_mesh()
  free = free_axes(mesh)
  if not set(AXES) & set(free):
    return params

  def one(path, x):
    name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
    name = re.sub(r"layers/\d+/", "layers/", name)  # one of several stacks
    spec = _spec_of(name, x.shape, mesh)
    if gathered:
      spec = _gathered(name, spec)
      return jax.lax.with_sharding_constraint(x, _only(spec, free))
    of_gradient = _spec_of(name, x.shape, mesh, GRADIENT_RULES)
    return _lay_out(x, _only(spec, free), _only(of_gradient, free))

  return jax.tree_util.tree_map_with_path(one, params)


def fsdp_shards() -> int:
  """Returns the number of shards of each layer in the mesh in context."""
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  return math.prod(sizes.get(axis, 1) for axis in _FSDP)


def as_stored(params: PyTree) -> PyTree:
  """Lays parameters out as they are stored: split along fsdp and tensor.

  Each device computes its own shard of a function of them (a cast). Their
  gradients are split along data, too.
  """
  return _constrain(params, "", gathered=False)


@jax.custom_jvp
def _barrier(params: PyTree) -> PyTree:
  """Applies an `optimization_barrier` that lets tangents and gradients pass.

  A barrier between a gradient's sum and its split would force an all-reduce.
  """
  return jax.lax.optimization_barrier(params)


@_barrier.defjvp
def _barrier_jvp(primals, tangents):
  return _barrier(*primals), *tangents


def gather(params: PyTree, prefix: str = "") -> PyTree:
  """Lays parameters out as they are used: whole along fsdp, split along tensor.

  `prefix` is the path of `params`; "layer/" means one layer of a stack. In a
  rematerialised layer, the gathered parameters live as long as it runs.

  Their gradients are split again as soon as they are computed (reduce-scatter),
  a sum over devices in the dtype of the parameters. In bfloat16, if every
  addition is rounded, the sum of one micro-batch is off by about 0.4% for 8
  devices and 2% for 256 (errors of micro-batches are independent).
  """
  params = _constrain(params, prefix, gathered=False)
  params = _constrain(params, prefix, gathered=True)
  if prefix == "layer/":  # XLA:TPU sends while it computes, if it is free to
    return params
  # Otherwise XLA would sink the gathering into the loops that use them.
  return _barrier(params)


def all_but_gathered(primitive, *_, **__) -> bool:
  """Policy of `jax.checkpoint`: save all values but gathered parameters.

  Layout operations are repeated. A policy by names (`checkpoint_name`) would
  keep the gathered array that has the name.
  """
  layout = "sharding_constraint", "custom_jvp_call"  # `_barrier`
  return primitive.name not in layout


# The gradient of a weight that all devices read is a sum over all samples. If a
# loop adds it up, XLA sums the whole weight over all devices in each turn (an
# all-reduce). With one copy of the weight per device, and samples [devices,
# rows, ...], the loop adds up each device's own gradient, and the copies' are
# added up once after it: a reduce-scatter if the weight is sharded.


def _row_axes() -> dict[str, int]:
  free = free_axes(jax.sharding.get_abstract_mesh())
  return {axis: free[axis] for axis in mesh_lib.ROWS if axis in free}


def copy_for_rows(x: Array) -> Array:
  """Returns [devices, ...]: a copy of x per device that rows are split over.

  Without a mesh, x is returned as it is.
  """
  axes = _row_axes()
  if not axes:
    return x
  rest = [P.UNCONSTRAINED] * x.ndim  # x may be split along tensor
  x = jnp.broadcast_to(x, (math.prod(axes.values()), *x.shape))
  return jax.lax.with_sharding_constraint(x, P(tuple(axes), *rest))


class RowShards(NamedTuple):
  """Layout of samples [B, G, ...] on the devices that rows are split over."""

  # B and G, each as the axes of the mesh that split it and the rest: (2, 3, 2,
  # 2) if data = 2 splits 6 prompts and fsdp = 2 their 4 samples.
  shape: tuple[int, ...]
  # Permutation that brings the mesh's axes to the front, in its order.
  order: tuple[int, ...]
  size: tuple[int, int]  # B and G

  def split(self, x: Array) -> Array:
    """[B, G, ...] -> [devices, rows, ...]; no row leaves its device."""
    axes, rest = _row_axes(), x.shape[2:]
    x = x.reshape(*self.shape, *rest).transpose(*self.order, *self._after(x))
    x = x.reshape(math.prod(axes.values()), -1, *rest)
    return jax.lax.with_sharding_constraint(x, P(tuple(axes)))

  def join(self, x: Array) -> Array:
    """[devices, rows, ...] -> [B, G, ...], the inverse of `split`."""
    rest, after = x.shape[2:], self._after(x)
    x = x.reshape(*(self.shape[i] for i in self.order), *rest)
    back = sorted(range(len(self.order)), key=self.order.__getitem__)
    return x.transpose(*back, *after).reshape(*self.size, *rest)

  def _after(self, x: Array) -> range:
    return range(len(self.shape), len(self.shape) + x.ndim - 2)


def row_shards(prompts: int, group_size: int) -> RowShards | None:
  """Returns the layout of [B, G, ...]; None where an axis divides neither."""
  axes, size = _row_axes(), (prompts, group_size)
  rules = (mesh_lib.ACTIVATIONS["batch"], mesh_lib.ACTIVATIONS["group"])
  shape, index = [], {}
  for count, names in zip(size, divide(size, rules, axes), strict=True):
    for axis in names:
      index[axis] = len(shape)
      shape.append(axes[axis])
      count //= axes[axis]
    shape.append(count)
  if index.keys() != axes.keys():
    return None
  first = [index[axis] for axis in axes]
  rest = (i for i in range(len(shape)) if i not in first)
  return RowShards(tuple(shape), (*first, *rest), size)
