"""A mesh of devices, and one table of the axes that cut activations.

The pure functions name the axes of what they compute:

    x = constrain(x, "batch", "group", None, None)  # [B, G, S, D]

and `ACTIVATIONS` says which axes of the mesh in context (`jax.set_mesh`) may
cut them. Without a mesh in context nothing happens. Parameters have a table of
their own, `models.sharding.RULES`.

Axes must be of type Auto, as `make_mesh` has them; Explicit and Manual ones are
a user's or a `jax.shard_map`'s. Without constraints XLA would follow the cut of
the parameters, and compute all rows on every device.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from grpojax.core.types import OF_PROMPTS, Batch, Rollout

AXES = ("data", "fsdp", "expert", "tensor")
"""Axes of a mesh: `data` cuts rows; `fsdp` rows, and parameters (gathered for
use); `expert` rows, and experts; `tensor` heads, the MLP and the vocabulary."""

SLICE = "slice"
"""Axis of several slices of TPUs, the outer part of `data`. It cuts rows only:
gradients are summed inside each slice first."""

# The default axis type differs between versions of JAX.
_AUTO = (AxisType.Auto,) * len(AXES)
ROWS = (SLICE, "data", "fsdp", "expert")
ACTIVATIONS = {
  "batch": ROWS,  # B
  "group": ROWS,  # G: what does not divide B
  "kv_heads": ("tensor",),  # K
  "query_heads": ("tensor",),  # R: where tensor does not divide K
  "mlp": ("tensor",),  # F
  "vocabulary": ("tensor",),  # V
}
"""Axes of activations, and axes of the mesh that may cut them (`divide`)."""


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  expert: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Makes a mesh of all devices with the axes `AXES`, -1 for all that are left.

  `data` includes the slices of TPUs (the axis `SLICE`). ValueError if the axes
  do not multiply to the number of devices, or `data` is no multiple of the
  slices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes, count = [data, fsdp, expert, tensor], len(devices)
  text = " ".join(f"{a}={n}" for a, n in zip(AXES, sizes, strict=True))
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ValueError(f"mesh {text}: axes are 1 or more, and at most one is -1")
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  elif -1 in sizes or known != count:
    need = f"a multiple of {known}" if -1 in sizes else str(known)
    raise ValueError(
      f"mesh {text} needs {need} devices, and there are {count}: choose axes "
      f"whose product is {count}, or set one axis to -1"
    )
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices == 1:
    return _mesh_of_slice(sizes, devices)
  if devices[0].platform != "tpu":
    # JAX calls each node of GPUs a slice; they are in the order of the nodes.
    return Mesh(np.reshape(devices, sizes), AXES, axis_types=_AUTO)
  data, rest = divmod(sizes[0], slices)
  if rest:
    raise ValueError(
      f"mesh.data = {sizes[0]}: must be a multiple of the {slices} slices; the "
      "other axes lie within one"
    )
  placed = mesh_utils.create_hybrid_device_mesh(
    (1, data, *sizes[1:]),
    (slices, 1, 1, 1, 1),
    devices,
    allow_split_physical_axes=True,
  )
  return Mesh(placed, (SLICE, *AXES), axis_types=(AxisType.Auto, *_AUTO))


def _mesh_of_slice(sizes: list[int], devices: list[jax.Device]) -> Mesh:
  """Lays the axes over the torus of one slice, or over other devices."""
  try:
    return jax.make_mesh(tuple(sizes), AXES, axis_types=_AUTO, devices=devices)
  except NotImplementedError:
    # It takes whole axes of a torus only: 8 x 8 chips, not fsdp=32 tensor=2.
    placed = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
    return Mesh(placed, AXES, axis_types=_AUTO)


def sampling_mesh(
  mesh: Mesh, tensor: int, devices: Sequence[jax.Device] = ()
) -> Mesh:
  """Returns the devices of a mesh, or others in their place, for sampling.

  `tensor` devices share each weight, 0 for as many as in training; data and
  fsdp cut rows only (see `LM.prepare`). ValueError if they cannot be cut so.
  """
  of_tensor = "sampling_tensor" if tensor else "tensor"
  tensor, expert = tensor or mesh.shape["tensor"], mesh.shape["expert"]
  if devices:
    rows, rest = divmod(len(devices), expert * tensor)
    if rest:
      raise ValueError(
        f"mesh.sampling_devices = {len(devices)}: must be a multiple of "
        f"mesh.expert = {expert} times mesh.{of_tensor} = {tensor}"
      )
    return make_mesh(1, rows, expert, tensor, devices)
  if tensor == mesh.shape["tensor"]:
    return mesh
  count = mesh.size // mesh.shape.get(SLICE, 1)
  rows, rest = divmod(count, expert * tensor)
  if rest:
    raise ValueError(
      f"mesh.sampling_tensor = {tensor}: times mesh.expert = {expert} it must "
      f"divide the {count} devices"
    )
  data = math.gcd(mesh.shape["data"], rows)
  sizes = dict(mesh.shape) | dict(data=data, fsdp=rows // data, tensor=tensor)
  devices = mesh.devices.reshape(*sizes.values())
  return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def free_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
  """Returns the sizes of the axes along which this table cuts arrays."""
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return {name: n for name, n, kind in axes if kind == AxisType.Auto and n > 1}


def runs_kernels() -> bool:
  """Returns True if kernels, which XLA does not split, get a device's part.

  That takes one device, or a mesh in context whose axes are all Auto.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.axis_names:
    return jax.device_count() == 1
  return set(mesh.axis_types) == {AxisType.Auto}


def divide(
  shape: Sequence[int],
  allowed: Sequence[Sequence[str]],
  sizes: Mapping[str, int],
) -> list[tuple[str, ...]]:
  """Divides the axes of an array among those of a mesh, with these sizes.

  Each axis of the mesh cuts the first axis of the array that it may cut
  (`allowed`) and whose size it divides: data=2 cuts 2 prompts of 8 samples
  along B, fsdp=4 along G. Returns the axes that cut each; one of size 1 stands
  alone.
  """
  free, axes_of_each = dict(sizes), []
  for size, axes in zip(shape, allowed, strict=False):
    taken = []
    for axis in axes:
      useless = free.get(axis) == 1 and taken
      if axis in free and size % free[axis] == 0 and not useless:
        size //= free.pop(axis)
        taken.append(axis)
    axes_of_each.append(tuple(taken))
  return axes_of_each


@functools.cache  # once for each mesh
def _warn_of_other_axes(mesh: AbstractMesh) -> None:
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  text = ", ".join(f"{name}={n} ({kind.name})" for name, n, kind in axes)
  warnings.warn(
    f"the mesh in context has the axes {text}, and grpojax lays arrays out "
    f"along {', '.join(AXES)} of type Auto alone: without a layout of yours "
    "every device does the whole work. Use grpojax.make_mesh(), or name the "
    "axes so",
    stacklevel=3,
  )


def activation_spec(
  mesh: Mesh | AbstractMesh, shape: Sequence[int], names: Sequence[str | None]
) -> P:
  """Returns the spec of an activation whose first axes have these names."""
  allowed = [ACTIVATIONS[name] if name else () for name in names]
  return P(*(axes or None for axes in divide(shape, allowed, free_axes(mesh))))


def activation_sharding(
  mesh: Mesh, shape: Sequence[int], *names: str | None
) -> NamedSharding:
  """Returns the `NamedSharding` of an activation (`activation_spec`)."""
  return NamedSharding(mesh, activation_spec(mesh, shape, names))


def constrain(x: Array, *names: str | None) -> Array:
  """Lays an activation out over the mesh in context, if there is one.

  `names`, from `ACTIVATIONS` or None, are of its first axes; others stay whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not {SLICE, *AXES} & free_axes(mesh).keys():
    if AxisType.Manual not in mesh.axis_types and mesh.size > 1:
      _warn_of_other_axes(mesh)
    return x
  spec = activation_spec(mesh, x.shape, names)
  return jax.lax.with_sharding_constraint(x, spec)


def shardings(
  tree: PyTree,
  mesh: Mesh | AbstractMesh,
  *,
  axis: str = "fsdp",
  min_size: int = 2**16,
) -> PyTree:
  """Returns a `NamedSharding` for each array of a tree, by the array's size.

  An array of at least `min_size` elements is split over the mesh's `axis` along
  the largest of its dimensions that the axis divides (the first of equal ones),
  others stay whole. So moments of an optimizer are split as their parameters
  are. The tree has arrays or `jax.ShapeDtypeStruct`s: parameters, or a whole
  `TrainState`. Parameters of `grpojax.transformer` have rules by their names in
  `models.sharding`. ValueError if the mesh has no such axis.
  """
  if axis not in mesh.shape:
    raise ValueError(
      f"the mesh has the axes {', '.join(mesh.shape)}, and not {axis!r}: give "
      "axis=, the one that splits parameters"
    )
  devices = mesh.shape[axis]

  def by_size(x):
    sizes = [0 if size % devices else size for size in x.shape]
    if math.prod(x.shape) < min_size or not any(sizes):
      return NamedSharding(mesh, P())
    dimension = sizes.index(max(sizes))
    return NamedSharding(mesh, P(*[None] * dimension, axis))

  return jax.tree.map(by_size, tree)


def place(tree: PyTree, mesh: Mesh, *names: str | None) -> PyTree:
  """Puts arrays on a mesh, equal in all processes; names as in `constrain`."""
  return jax.tree.map(
    lambda x: put(x, activation_sharding(mesh, x.shape, *names)), tree
  )


def put(x, sharding: NamedSharding) -> Array:
  """Does `jax.device_put`, without comparing arrays across processes."""
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  # It moves no keys to another mesh of several processes.
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return jax.device_put(x, sharding)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def _same(x: Array) -> Array:
  return x


def whole(tree: PyTree) -> PyTree:
  """Gathers arrays whole on every device, in all processes, without waiting."""

  def one(x):
    local = not isinstance(x, jax.Array) or x.is_fully_replicated
    if local or x.is_fully_addressable:
      return x
    return jax.jit(_same, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)

  return jax.tree.map(one, tree)


def fetch(tree: PyTree) -> PyTree:
  """Returns all arrays whole, as NumPy arrays; every process must call it."""
  return jax.device_get(whole(tree))


def map_rows(
  function: Callable[..., Any], rows: Rollout | Batch
) -> Rollout | Batch:
  """Maps a function of an array and its axes' names, such as `constrain`."""

  def of_field(name, value):
    axes = ("batch",) if name in OF_PROMPTS else ("batch", "group")
    return jax.tree.map(lambda x: function(x, *axes), value)

  return rows.replace(**{f: of_field(f, x) for f, x in vars(rows).items()})


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
  """Returns the sharding of arrays [B, ...] from the host; B = rows."""
  return activation_sharding(mesh, (rows,), "batch")


def mesh_of(shardings: PyTree) -> Mesh:
  """Returns the mesh of a tree of shardings."""
  return jax.tree.leaves(shardings)[0].mesh


def row_shards(mesh: Mesh | AbstractMesh) -> int:
  """Returns the number of parts that a mesh cuts rows into, 1 without one."""
  return math.prod(dict(mesh.shape).get(axis, 1) for axis in ROWS)


def sample_cuts(prompts: int, group_size: int) -> tuple[int, int]:
  """Returns the numbers of parts that the mesh in context cuts B and G into."""
  free = free_axes(jax.sharding.get_abstract_mesh())
  allowed = (ACTIVATIONS["batch"], ACTIVATIONS["group"])
  b, g = divide((prompts, group_size), allowed, free)
  return tuple(math.prod(free[axis] for axis in axes) for axes in (b, g))


def check_rows(mesh: Mesh | AbstractMesh, group_size: int = 1, **rows: int):
  """Refuses, by ValueError, batches that the row axes cannot cut evenly.

  `rows` are the prompts of each kind of batch, by its name for the error.
  """
  for name, count in rows.items():
    cut = divide((count, group_size), (ROWS, ROWS), mesh.shape)
    parts = math.prod(mesh.shape[axis] for axes in cut for axis in axes)
    if parts != row_shards(mesh):
      axes = ", ".join(f"{a} = {n}" for a, n in mesh.shape.items() if a in ROWS)
      raise ValueError(
        f"{name}: {count} prompts x {group_size} samples cannot be cut evenly "
        f"over {row_shards(mesh)} devices (mesh: {axes}); each axis must "
        "divide the prompts or the samples of each: change batch_size, "
        "group_size, optim.micro_batches, eval.batch_size or the mesh"
      )
