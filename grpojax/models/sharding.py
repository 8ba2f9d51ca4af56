"""Which part of which parameter lives on which device: one table.

The table maps the end of a parameter's path to a `PartitionSpec`, so it fits a
bare parameter tree, a `TrainState`, and optimizer state that mirrors the
parameters. What is computed with them has a table too, in `core.mesh`.
"""

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from grpojax.core.mesh import AXES, divide, free_axes

_FSDP = ("fsdp", "expert")  # of what is gathered; experts stay where they are
RULES = (
  # (pattern matched against the end of the path, axes); shapes beside them
  (r"embed", P(("tensor", *_FSDP), _FSDP)),  # [V, D]
  (r"head", P(_FSDP, "tensor")),  # [D, V]
  (r"layers/(q|k|v|gate|up)", P(None, _FSDP, "tensor")),  # [L, D, ...]
  (r"layers/(o|down)", P(None, "tensor", _FSDP)),  # [L, ..., D]
  (r"layers/(q|k|v|gate|up)_bias", P(None, "tensor")),  # [L, ...]
  (r"layers/router", P(None, _FSDP)),  # [L, D, X]
  # [L, X, D, F] and [L, X, F, D]
  (r"layers/expert_(gate|up)", P(None, "expert", "fsdp", "tensor")),
  (r"layers/expert_down", P(None, "expert", "tensor", "fsdp")),
  # Adapters, by themselves or beside their matrices (`lora.attach`).
  (r"layers/(q|k|v|gate|up)(/|_lora_)a", P(None, _FSDP)),  # [L, D, r]
  (r"layers/(q|k|v|gate|up)(/|_lora_)b", P(None, None, "tensor")),  # [L, r, ..]
  (r"layers/(o|down)(/|_lora_)a", P(None, "tensor")),  # [L, ..., r]
  (r"layers/(o|down)(/|_lora_)b", P(None, None, _FSDP)),  # [L, r, D]
  # These stay whole: they are small, and each device needs all of them.
  (r"final_norm|layers/\w+_norm", P()),  # [D], [L, D] or [L, E]
  (r"layers/(o|down)_bias", P()),  # [L, D]
  (r"score", P()),  # [D, labels]
  (r"ns_coeffs", P()),  # [steps, 3], of optax.contrib.muon
)
"""Rules for `models.transformer`, its LoRA adapters and its optimizers' state.

Vectors and scalars that no rule names (keys, counts, step sizes) stay whole.
A matrix that no rule names is refused: held whole on every device in silence,
it would cost the memory that the mesh was to save.
"""


def _and_data(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """Axes of a rule, with data before fsdp, as they are in the mesh."""
  axes = (axes,) if isinstance(axes, str) else axes or ()
  return tuple(y for x in axes for y in (("data", x) if x == "fsdp" else (x,)))


GRADIENT_RULES = tuple((name, P(*map(_and_data, p))) for name, p in RULES)
"""Of gradients, until the optimizer takes them: cut along data as well.

So they are added up over all devices that have rows by one reduce-scatter. Cut
along fsdp alone, XLA makes an all-reduce of it, which sends twice as much. It
only sees a reduce-scatter where the axes follow each other as in the mesh."""

REDUCED = {"row": -1, "col": -2}
"""The axis that a statistic of a matrix lacks, by the last name of its path
(see `core.factored_rms`): it is cut as the matrix is along the others."""


def _divided(spec, shape: Sequence[int], mesh: Mapping[str, int]) -> P:
  """The axes of a rule that divide their dimensions, each of them once."""
  wanted = ((x,) if isinstance(x, str) else x or () for x in spec)
  taken = divide(shape, tuple(wanted), mesh)
  return P(*(axes[0] if len(axes) == 1 else axes or None for axes in taken))


def spec_for(
  path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules=RULES
) -> P:
  """The `PartitionSpec` of one array.

  Args:
    path: names from the root, joined by "/": "params/layers/q".
    shape: the array's shape.
    mesh: has the axes that the rules name.
    rules: pairs of a pattern, matched against the end of the path, and axes;
      the first that matches is taken.

  Returns:
    The rule's axes, less those that do not divide their dimension; no axes at
    all where the rule has more dimensions than the array (an optimizer's state
    that is reduced along one), or where no rule names a vector or a scalar.

  Raises:
    ValueError: an array of two or more dimensions that no rule names.
  """
  matrix, _, side = path.rpartition("/")
  name = matrix if side in REDUCED else path
  for pattern, spec in rules:
    if not re.search(rf"(^|/)({pattern})$", name):
      continue
    if side in REDUCED:
      axes = [*spec, *[None] * (len(shape) + 1 - len(spec))]
      del axes[REDUCED[side]]
      spec = P(*axes)
    if len(spec) > len(shape):
      return P()
    return _divided(spec, shape, dict(mesh.shape))
  if len(shape) > 1:
    raise ValueError(
      f"no sharding rule for {path} of shape {tuple(shape)}: add a rule to "
      "RULES in grpojax/models/sharding.py, or give rules= of your own (P() "
      "keeps an array whole)"
    )
  return P()


def shardings(tree: PyTree, mesh: Mesh, rules=RULES) -> PyTree:
  """A `NamedSharding` for each array of any tree.

  Args:
    tree: arrays or `jax.ShapeDtypeStruct`s: parameters, optimizer state or a
      whole `TrainState`.
    mesh: from `make_mesh`.
    rules: see `spec_for`.

  Returns:
    The same tree of shardings, as `jax.jit` and `jax.device_put` take them.

  Raises:
    ValueError: a matrix that no rule names, see `spec_for`.
  """

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, spec_for(name, leaf.shape, mesh, rules))

  return jax.tree_util.tree_map_with_path(one, tree)


def _kept(spec: P, names: Collection[str]) -> P:
  """A spec with only these axes of the mesh."""

  def kept(axes):
    axes = axes if isinstance(axes, tuple) else (axes,)
    axes = tuple(axis for axis in axes if axis in names)
    return axes[0] if len(axes) == 1 else axes or None

  return P(*map(kept, spec))


def placed(tree: PyTree, mesh: Mesh) -> PyTree:
  """Abstract arrays with their `shardings`."""
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    tree,
    shardings(tree, mesh),
  )


def shard_bytes(tree: PyTree) -> int:
  """Bytes on each device of abstract arrays, cut as their shardings say."""

  def one(x):
    place = x.sharding
    shape = x.shape if place is None else place.shard_shape(x.shape)
    size = 8  # of a random key
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      size = jnp.dtype(x.dtype).itemsize
    return size * math.prod(shape)

  return sum(map(one, jax.tree.leaves(tree)))


def _gathered(path: str, spec: P) -> P:
  """The spec of a parameter while it is used: experts stay where they are."""
  dropped = ("fsdp",) if "/expert_" in path else _FSDP
  return _kept(spec, set(AXES) - set(dropped))


def _spec_of(
  name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh, rules=RULES
) -> P:
  """`spec_for`, also of one layer's parameter: "layer/q" of "layers/q"."""
  if not name.startswith("layer/"):
    return spec_for(name, shape, mesh, rules)
  stack = name.replace("layer/", "layers/", 1)
  return P(*spec_for(stack, (1, *shape), mesh, rules)[1:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _lay_out(x: Array, spec: P, gradient_spec: P) -> Array:
  """A sharding constraint, and another one for the gradient."""
  del gradient_spec
  return jax.lax.with_sharding_constraint(x, spec)


@_lay_out.defjvp
def _lay_out_jvp(spec, gradient_spec, primals, tangents):
  # A constraint is its own transpose.
  (x,), (t,) = primals, tangents
  t = jax.lax.with_sharding_constraint(t, gradient_spec)
  return _lay_out(x, spec, gradient_spec), t


def _constrain(params: PyTree, prefix: str, gathered: bool) -> PyTree:
  """Lays parameters out over the mesh in context, if there is one.

  Args:
    params: a part of a `transformer`'s parameters.
    prefix: path of the part; "layer/" means one layer of a stack.
    gathered: whole along fsdp, or cut as the table says.
  """
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
      return jax.lax.with_sharding_constraint(x, _kept(spec, free))
    of_gradient = _spec_of(name, x.shape, mesh, GRADIENT_RULES)
    return _lay_out(x, _kept(spec, free), _kept(of_gradient, free))

  return jax.tree_util.tree_map_with_path(one, params)


def layer_spec(name: str, shape: Sequence[int], mesh: AbstractMesh) -> P:
  """The `PartitionSpec` of a parameter of one layer, as `gather` leaves it."""
  path = f"layer/{name}"
  spec = _gathered(path, _spec_of(path, shape, mesh))
  return _kept(spec, [axis for axis, n in mesh.shape.items() if n > 1])


def all_but_gathered(primitive, *_, **__) -> bool:
  """A policy of `jax.checkpoint`: keep all values but gathered parameters.

  Whatever only lays an array out is done again, so that parameters are kept as
  they are stored. Names (`checkpoint_name`) would not do: what the name was
  given to, the gathered array, would be kept instead.
  """
  layout = "sharding_constraint", "custom_jvp_call"  # `_barrier`
  return primitive.name not in layout


def fsdp_shards() -> int:
  """Parts that the mesh in context cuts each layer's parameters into."""
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  return math.prod(sizes.get(axis, 1) for axis in _FSDP)


def cut(params: PyTree, prefix: str = "") -> PyTree:
  """Parameters as they are stored: cut along fsdp and tensor.

  For what was computed from them (cast): so it is computed from a part on each
  device. Gradients with respect to them are cut along data, too.
  """
  return _constrain(params, prefix, gathered=False)


@jax.custom_jvp
def _barrier(params: PyTree) -> PyTree:
  """An `optimization_barrier` that lets tangents and gradients pass.

  A barrier between a gradient's sum and its cut would make them an all-reduce
  of the whole, and each device cut it afterwards.
  """
  return jax.lax.optimization_barrier(params)


@_barrier.defjvp
def _barrier_jvp(primals, tangents):
  return _barrier(*primals), *tangents


def gather(params: PyTree, prefix: str = "") -> PyTree:
  """Parameters as they are used: whole along fsdp, still cut along tensor.

  Their gradients are cut again as soon as they are computed (reduce-scatter),
  by the transpose of the first constraint. That adds them up over the devices
  in the dtype of what was gathered: in bfloat16 the sum of one micro-batch is
  off by about 0.4% for 8 devices and 2% for 256 if every addition is rounded
  (micro-batches are added in float32, and their errors are independent).

  Called in a layer that is rematerialised, the gathered parameters live as long
  as the layer runs.

  Args:
    params: a part of a `transformer`'s parameters.
    prefix: path of the part; "layer/" means one layer of a stack.
  """
  params = _constrain(params, prefix, gathered=False)
  params = _constrain(params, prefix, gathered=True)
  # Or XLA would sink the gathering into the loops that use them.
  return _barrier(params)
