"""Which part of which array lives on which device: a mesh and one table.

The mesh has three axes: `data` (batch only), `fsdp` (batch, and parameters cut
along a width) and `tensor` (heads and the MLP). The table maps the end of a
parameter's path to a `PartitionSpec`, so it fits a bare parameter tree, a
`TrainState`, and optimizer state that mirrors the parameters.
"""

import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

AXES = ("data", "fsdp", "tensor")

RULES = (
  # (pattern matched against the end of the path, axes); shapes beside them
  (r"embed", P("tensor", "fsdp")),  # [V, D]
  (r"head", P("fsdp", "tensor")),  # [D, V]
  (r"layers/(q|k|v|gate|up)", P(None, "fsdp", "tensor")),  # [L, D, ...]
  (r"layers/(o|down)", P(None, "tensor", "fsdp")),  # [L, ..., D]
  (r"layers/(q|k|v|gate|up)_bias", P(None, "tensor")),  # [L, ...]
  (r"layers/router", P(None, "fsdp")),  # [L, D, X]
  (r"layers/expert_(gate|up)", P(None, None, "fsdp", "tensor")),  # [L, X, D, F]
  (r"layers/expert_down", P(None, None, "tensor", "fsdp")),  # [L, X, F, D]
  (r"layers/(q|k|v|gate|up)/a", P(None, "fsdp")),  # [L, D, r]
  (r"layers/(q|k|v|gate|up)/b", P(None, None, "tensor")),  # [L, r, ...]
  (r"layers/(o|down)/a", P(None, "tensor")),  # [L, ..., r]
  (r"layers/(o|down)/b", P(None, None, "fsdp")),  # [L, r, D]
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


REDUCED = {"row": -1, "col": -2}
"""The axis that a statistic of a matrix lacks, by the last name of its path
(see `core.factored_rms`): it is cut as the matrix is along the others."""


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """A mesh of all devices with axes data, fsdp and tensor.

  Args:
    data: devices along `data`; -1 means all that the others leave.
    fsdp: likewise.
    tensor: likewise.
    devices: default `jax.devices()`.

  Raises:
    ValueError: the axes do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes, count = [data, fsdp, tensor], len(devices)
  text = f"mesh data={data} fsdp={fsdp} tensor={tensor}"
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ValueError(f"{text}: axes are 1 or more, and at most one is -1")
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  elif -1 in sizes or known != count:
    need = f"a multiple of {known}" if -1 in sizes else str(known)
    raise ValueError(
      f"{text} needs {need} devices, and there are {count}: choose axes whose "
      f"product is {count}, or set one axis to -1"
    )
  # Auto, because the default axis type differs between versions of JAX.
  types = (AxisType.Auto,) * len(AXES)
  return jax.make_mesh(tuple(sizes), AXES, axis_types=types, devices=devices)


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
    axes = [
      axis if axis and size % mesh.shape[axis] == 0 else None
      for size, axis in zip(shape, spec, strict=False)
    ]
    return P(*axes)
  if len(shape) > 1:
    raise ValueError(
      f"no sharding rule for {path} of shape {tuple(shape)}: add a rule to "
      "RULES in grpojax/runtime/sharding.py, or give rules= of your own (P() "
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


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays [B, ...]: prompts over data and fsdp, groups whole."""
  return NamedSharding(mesh, P(("data", "fsdp")))


def row_shards(mesh: Mesh | AbstractMesh) -> int:
  """Into how many parts the prompts of a batch are cut."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def check_rows(mesh: Mesh | AbstractMesh, **rows: int) -> None:
  """Whether batches can be cut evenly over the mesh's data and fsdp axes.

  Args:
    mesh: from `make_mesh`.
    **rows: prompts of each kind of batch, by its name for the error.

  Raises:
    ValueError: the devices along data and fsdp do not divide one of them.
  """
  shards = row_shards(mesh)
  for name, count in rows.items():
    if count % shards:
      raise ValueError(
        f"{name}: {count} prompts cannot be cut evenly over {shards} devices "
        "(mesh.data x mesh.fsdp); change batch_size, optim.micro_batches, "
        "eval.batch_size or the mesh"
      )
