"""Meshes of whole TPU slices, whose chips are a torus."""

import itertools
import pathlib
import sys

import numpy as np
import pytest

from grpojax.aot import topology
from grpojax.core.mesh import AXES, make_mesh

sys.path.append(str(pathlib.Path(__file__).parent))
import processes  # noqa: E402


def shapes(count):
  """Of all meshes of so many devices whose axes are powers of 2."""
  powers = [2**i for i in range(count.bit_length())]
  for inner in itertools.product(powers, (1, 2, 4), (1, 2, 4, 8)):
    if count % np.prod(inner) == 0:
      yield count // int(np.prod(inner)), *inner


def check(devices):
  """Each can be had, and what shares a weight is one link away.

  Also where fsdp takes all of one axis of the torus and half of another.
  """
  everything = {d.id for d in devices}
  for shape in shapes(len(devices)):
    mesh = make_mesh(*shape, devices=devices)
    assert mesh.devices.shape == shape and mesh.axis_names == AXES
    assert {d.id for d in mesh.devices.flat} == everything, shape
  mesh = make_mesh(1, len(devices) // 2, 1, 2, devices=devices)
  for one, other in mesh.devices.reshape(-1, 2):
    apart = np.abs(np.subtract(one.coords, other.coords)).sum()
    assert apart == 1, (one.coords, other.coords)


def test_any_mesh_can_be_laid_on_a_slice():
  """Also on slices that libtpu has to be told of: parts of hosts, and v4."""
  pytest.importorskip("libtpu")
  names = {"v5e:4x4": 16, "v6e:8x8": 64, "v5p:4x4x4": 64, "v4:2x2x4": 16}
  names |= {"v5e:1x1": 1, "v6e:1x2": 2, "v4:2x2x1": 4}
  out = processes.run(__file__, *names)  # for libtpu reads the environment
  assert out.splitlines() == [f"{name} {n} 1" for name, n in names.items()]


if __name__ == "__main__":
  for name in sys.argv[1:]:
    _, chip, devices = topology.machine(name)
    print(name, make_mesh(devices=devices).size, chip.devices)
    if len(devices) > 4:
      check(devices)
