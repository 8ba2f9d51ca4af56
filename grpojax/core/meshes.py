"""A mesh of devices, and a table of the mesh axes that may split activations.

Pure functions name the axes of the arrays that they compute:

    x = constrain(x, "batch", "group", None, None)  # [B, G, S, D]

and `ACTIVATIONS` says which axes of the mesh in context (`jax.set_mesh`) may
split them. Without a mesh in context this has no effect. Parameters have their
own table, `models.sharding.RULES`.

Mesh axes must be of type Auto, as in `make_mesh`; Explicit and Manual axes
belong to the user or to `jax.shard_map`. Without constraints XLA would follow
the parameters' sharding, and compute all rows on every device.
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

AXES = ("data", "fsdp", "expert", "tensor")
"""Axes of a mesh: `data` splits rows; `fsdp` rows and parameters (gathered for
use); `expert` rows and experts; `tensor` heads, the MLP and the vocabulary."""

SLICE = "slice"
"""Axis of several TPU slices, the outer part of `data`. It splits only rows:
gradients are summed inside each slice first."""

# The default axis type differs between versions of JAX.
_AUTO = (AxisType.Auto,) * len(AXES)
ROWS = (SLICE, "data", "fsdp", "expert")
ACTIVATIONS = {
  "batch": ROWS,  # B
  "group": ROWS,  # G: takes axes that do not divide B
  "kv_heads": ("tensor",),  # K
  "query_heads": ("tensor",),  # R: if tensor does not divide K
  "mlp": ("tensor",),  # F
  "vocabulary": ("tensor",),  # V
}
"""Axes of activations, and the mesh axes that may split them (`divide`)."""


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  expert: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Makes a mesh with axes `AXES`; -1 takes all remaining devices.

  `data` must be a multiple of the number of TPU slices (axis `SLICE`).
  ValueError unless the axes multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = [data, fsdp, expert, tensor]
  count = len(devices)
  text = " ".join(f"{a}={n}" for a, n in zip(AXES, sizes, strict=True))
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ValueError(f"mesh {text}: use axes of at least 1, and at most one -1")
  # Fill in the axis of -1.
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  elif -1 in sizes or known != count:
    need = f"a multiple of {known}" if -1 in sizes else str(known)
    raise ValueError(
      f"mesh {text} needs {need} devices, and there are {count}: choose axes "
      f"whose product is {count}, or set an axis to -1"
    )
  # Place the devices: one slice, nodes of GPUs, or several TPU slices.
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices == 1:
    try:
      shape = tuple(sizes)
      return jax.make_mesh(shape, AXES, axis_types=_AUTO, devices=devices)
    except NotImplementedError:
      # JAX must be allowed to split a torus axis: fsdp=32 tensor=2 on 8 x 8.
      placed = mesh_utils.create_device_mesh(
        sizes, devices, allow_split_physical_axes=True
      )
      return Mesh(placed, AXES, axis_types=_AUTO)
  if devices[0].platform != "tpu":
    # JAX calls each node of GPUs a slice; devices are ordered by node.
    return Mesh(np.reshape(devices, sizes), AXES, axis_types=_AUTO)
  data, rest = divmod(sizes[0], slices)
  if rest:
    raise ValueError(
      f"mesh.data = {sizes[0]}: must be a multiple of the {slices} slices; the "
      "other axes lie within a slice"
    )
  # [slices, data per slice, fsdp, expert, tensor]
  placed = mesh_utils.create_hybrid_device_mesh(
    (1, data, *sizes[1:]),
    (slices, 1, 1, 1, 1),
    devices,
    allow_split_physical_axes=True,
  )
  return Mesh(placed, (SLICE, *AXES), axis_types=(AxisType.Auto, *_AUTO))


def sampling_mesh(
  mesh: Mesh, tensor: int, devices: Sequence[jax.Device] = ()
) -> Mesh:
  """Returns the mesh for sampling, on the mesh's devices or on `devices`.

  Each weight is split over `tensor` devices (0: as many as in training); data
  and fsdp split only rows (see `LM.prepare`). ValueError if the devices cannot
  be divided in this way.
  """
  tensor_name = "sampling_tensor" if tensor else "tensor"
  tensor = tensor or mesh.shape["tensor"]
  expert = mesh.shape["expert"]
  if devices:
    rows, rest = divmod(len(devices), expert * tensor)
    if rest:
      raise ValueError(
        f"mesh.sampling_devices = {len(devices)}: must be a multiple of "
        f"mesh.expert = {expert} times mesh.{tensor_name} = {tensor}"
      )
    return make_mesh(1, rows, expert, tensor, devices)
  if tensor == mesh.shape["tensor"]:
    return mesh
  # The same devices in another shape, within each slice.
  count = mesh.size // mesh.shape.get(SLICE, 1)
  rows, rest = divmod(count, expert * tensor)
  if rest:
    raise ValueError(
      f"mesh.sampling_tensor = {tensor}: times mesh.expert = {expert} it must "
      f"divide the {count} devices"
    )
  # `data` keeps the largest part that divides `rows`; fsdp gets the rest.
  data = math.gcd(mesh.shape["data"], rows)
  sizes = dict(mesh.shape) | dict(data=data, fsdp=rows // data, tensor=tensor)
  devices = mesh.devices.reshape(*sizes.values())
  return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def free_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
  """Returns the sizes of the Auto axes larger than 1, which split arrays."""
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return {name: n for name, n, kind in axes if kind == AxisType.Auto and n > 1}


def runs_kernels() -> bool:
  """Returns True if each device can call kernels on its part of an array.

  XLA cannot split kernels: this needs one device, or a mesh of only Auto axes.
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
  """Assigns mesh axes of these `sizes` to the axes of an array.

  Each mesh axis splits the first array axis that it may split (`allowed`) and
  whose size it divides: data=2 splits 2 prompts of 8 samples along B, fsdp=4
  along G. Returns the mesh axes that split each array axis.
  """
  free = dict(sizes)
  axes_of_each = []
  for size, axes in zip(shape, allowed, strict=False):
    taken = []
    for axis in axes:
      useless = free.get(axis) == 1 and taken  # size 1 splits nothing more
      if axis in free and size % free[axis] == 0 and not useless:
        # A mesh axis is used once, and the next must divide the rest of `size`.
        size //= free.pop(axis)
        taken.append(axis)
    axes_of_each.append(tuple(taken))
  return axes_of_each


@functools.cache  # once for each mesh
def _warn_of_other_axes(mesh: AbstractMesh) -> None:
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  text = ", ".join(f"{name}={n} ({kind.name})" for name, n, kind in axes)
  warnings.warn(
    f"the mesh in context has the axes {text}, but grpojax splits arrays only "
    f"along {', '.join(AXES)} of type Auto, so every device does all the work. "
    "Use grpojax.make_mesh() or these names, or split the arrays yourself",
    stacklevel=3,
  )


def activation_spec(
  mesh: Mesh | AbstractMesh, shape: Sequence[int], names: Sequence[str | None]
) -> P:
  """Returns the spec of an activation whose leading axes have these names."""
  allowed = [ACTIVATIONS[name] if name else () for name in names]
  return P(*(axes or None for axes in divide(shape, allowed, free_axes(mesh))))


def activation_sharding(
  mesh: Mesh, shape: Sequence[int], *names: str | None
) -> NamedSharding:
  """Returns the `NamedSharding` of an activation (`activation_spec`)."""
  return NamedSharding(mesh, activation_spec(mesh, shape, names))


def constrain(x: Array, *names: str | None) -> Array:
  """Constrains an activation to its sharding on the mesh in context, if any.

  `names` (keys of `ACTIVATIONS`, or None) are the names of its leading axes.
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

  Arrays of at least `min_size` elements are split over the mesh's `axis` along
  their largest dimension that it divides (the first of equals); other arrays
  stay whole. An optimizer's moments are split like their parameters. The tree
  has arrays or `jax.ShapeDtypeStruct`s: parameters, or a whole `TrainState`.
  For `grpojax.transformer`, `models.sharding` has rules by parameter name.
  ValueError if the mesh has no such axis.
  """
  if axis not in mesh.shape:
    raise ValueError(
      f"the mesh has the axes {', '.join(mesh.shape)}, and not {axis!r}: set "
      "axis= to the axis that splits parameters"
    )
  devices = mesh.shape[axis]

  def by_size(x):
    # Dimensions that cannot be split count as 0.
    sizes = [0 if size % devices else size for size in x.shape]
    if math.prod(x.shape) < min_size or not any(sizes):
      return NamedSharding(mesh, P())
    dimension = sizes.index(max(sizes))
    return NamedSharding(mesh, P(*[None] * dimension, axis))

  return jax.tree.map(by_size, tree)


def place(tree: PyTree, mesh: Mesh, *names: str | None) -> PyTree:
  """Puts arrays, equal in all processes, on a mesh; names as in `constrain`."""
  return jax.tree.map(
    lambda x: put(x, activation_sharding(mesh, x.shape, *names)), tree
  )


def put(x, sharding: NamedSharding) -> Array:
  """`jax.device_put` without comparing arrays across processes."""
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  # device_put cannot move keys to another mesh of several processes.
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return jax.device_put(x, sharding)
  # All processes have all of x, and each copies the parts of its devices.
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def run_like(
  function: Callable[..., Any], old: PyTree, *args: Any, **options: Any
) -> Any:
  """Compiles and runs `function(old, *args)`; shards the result like `old`.

  `options` are for `jax.jit`.
  """
  shardings = jax.tree.map(lambda x: x.sharding, old)
  return jax.jit(function, out_shardings=shardings, **options)(old, *args)


def _same(x: Array) -> Array:
  return x


def whole(tree: PyTree) -> PyTree:
  """Gathers whole arrays on every device, in all processes, without waiting."""

  def gather(x):
    local = not isinstance(x, jax.Array) or x.is_fully_replicated
    if local or x.is_fully_addressable:
      return x
    return jax.jit(_same, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)

  return jax.tree.map(gather, tree)


def fetch(tree: PyTree) -> PyTree:
  """Returns all arrays whole, in NumPy; every process must call it."""
  return jax.device_get(whole(tree))


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
  """Returns the sharding for arrays [rows, ...] that come from the host."""
  return activation_sharding(mesh, (rows,), "batch")


def row_shards(mesh: Mesh | AbstractMesh) -> int:
  """Returns the number of parts into which a mesh splits rows."""
  return math.prod(dict(mesh.shape).get(axis, 1) for axis in ROWS)


def sample_cuts(prompts: int, group_size: int) -> tuple[int, int]:
  """Returns into how many parts the mesh in context splits B and G."""
  free = free_axes(jax.sharding.get_abstract_mesh())
  allowed = (ACTIVATIONS["batch"], ACTIVATIONS["group"])
  b, g = divide((prompts, group_size), allowed, free)
  return tuple(math.prod(free[axis] for axis in axes) for axes in (b, g))


def check_rows(mesh: Mesh | AbstractMesh, group_size: int = 1, **rows: int):
  """Raises ValueError for batches that the row axes cannot split evenly.

  `rows` maps the names of batches, for the error, to their numbers of prompts.
  """
  for name, count in rows.items():
    cut = divide((count, group_size), (ROWS, ROWS), mesh.shape)
    parts = math.prod(mesh.shape[axis] for axes in cut for axis in axes)
    if parts != row_shards(mesh):
      axes = ", ".join(f"{a} = {n}" for a, n in mesh.shape.items() if a in ROWS)
      raise ValueError(
        f"{name}: {count} prompts x {group_size} samples cannot be split "
        f"evenly over {row_shards(mesh)} devices (mesh: {axes}), because each "
        "axis must divide the prompts or the samples per prompt: change "
        "batch_size, group_size, optim.micro_batches, eval.batch_size or the "
        "mesh"
      )
