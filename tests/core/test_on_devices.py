"""Programs on eight simulated devices, each in its own process."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from run_helpers import output_of

from grpojax.core import meshes

DIRECTORY = pathlib.Path(__file__).parent


PACKED = pytest.param("packed_on_mesh.py", marks=pytest.mark.long)
PROGRAMS = ["sharded_sampling.py", "sharded_by_size.py", PACKED]
PROGRAMS.append("environment_on_mesh.py")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_eight_devices_compute_the_same(program):
  """The programs also check the communication."""
  output_of(DIRECTORY / program, JAX_NUM_CPU_DEVICES="8")


def abstract_mesh(kind=AxisType.Auto, **axes):
  names = tuple(axes)
  sizes = tuple(axes.values())
  return AbstractMesh(sizes, names, axis_types=(kind,) * len(names))


def trace(mesh):
  with use_abstract_mesh(mesh):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    jax.eval_shape(lambda x: meshes.constrain(x, "batch"), x)


@pytest.mark.parametrize(
  "mesh, warned",
  [
    (abstract_mesh(dp=8), "dp=8"),
    (abstract_mesh(AxisType.Explicit, data=8), "data=8"),
    (abstract_mesh(dp=1), ""),
    (abstract_mesh(dp=2, tensor=4), ""),
  ],
)
def test_a_mesh_of_unknown_axes_warns_once(mesh, warned):
  if warned:
    words = f"{warned} .* data, fsdp, expert, tens"
    with pytest.warns(UserWarning, match=words):
      trace(mesh)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    trace(mesh)


@pytest.mark.parametrize(
  "shape, spec",
  [
    ((64, 128), P(None, "fsdp")),
    ((128, 64), P("fsdp")),
    ((64, 64), P("fsdp")),  # the first of equal axes
    ((99, 64, 16), P(None, "fsdp")),  # 8 does not divide 99
    ((8, 8), P()),  # small
    ((), P()),
  ],
)
def test_shardings_by_size(shape, spec):
  tree = {"w": jax.ShapeDtypeStruct(shape, jnp.float32), "none": None}
  mesh = abstract_mesh(data=1, fsdp=8)
  assert meshes.shardings(tree, mesh, min_size=4096)["w"].spec == spec
  with pytest.raises(ValueError, match="axes data, fsdp, and not 'model'"):
    meshes.shardings(tree, mesh, axis="model")
