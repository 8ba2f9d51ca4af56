"""Meshes of whole TPU slices, which are tori of chips."""

import collections
import itertools
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest

from grpojax.aot import cost, hlo, topology
from grpojax.core.meshes import (
  AXES,
  activation_sharding,
  constrain,
  make_mesh,
  sampling_mesh,
)
from grpojax.models import sharding

LAYERS = 2
D = 512
ROWS = 1024
MATRICES = LAYERS * 2 * D * D * 2  # bytes, of bfloat16


def shapes(count):
  """Yields all meshes of `count` devices with powers of 2 as axes."""
  powers = [2**i for i in range(count.bit_length())]
  for inner in itertools.product(powers, (1, 2, 4), (1, 2, 4, 8)):
    if count % np.prod(inner) == 0:
      yield count // int(np.prod(inner)), *inner


def check(devices):
  """Checks that every mesh exists, and devices sharing a weight are neighbours.

  Also if fsdp takes a whole axis of the torus and half of another.
  """
  everything = {d.id for d in devices}
  for shape in shapes(len(devices)):
    mesh = make_mesh(*shape, devices=devices)
    assert mesh.devices.shape == shape and mesh.axis_names == AXES
    assert {d.id for d in mesh.devices.flat} == everything, shape
  mesh = make_mesh(1, len(devices) // 2, 1, 2, devices=devices)
  for a, b in mesh.devices.reshape(-1, 2):
    distance = np.abs(np.subtract(a.coords, b.coords)).sum()
    assert distance == 1, (a.coords, b.coords)


@pytest.mark.slow
def test_any_mesh_fits_a_slice():
  """Also on slices with extra options for libtpu: parts of hosts, and v4."""
  pytest.importorskip("libtpu")
  names = {"v5e:4x4": 16, "v6e:8x8": 64, "v5p:4x4x4": 64, "v4:2x2x4": 16}
  names |= {"v5e:1x1": 1, "v6e:1x2": 2, "v4:2x2x1": 4}
  out = processes.run(__file__, *names)  # as libtpu reads the environment
  assert out.splitlines() == [f"{name} {n}" for name, n in names.items()]


def device(index, number, platform):
  fake = mock.Mock(spec=jax.Device)
  fake.configure_mock(id=number, slice_index=index, platform=platform)
  return fake


def test_data_takes_whole_slices():
  """Only on TPUs; GPU nodes, which JAX calls slices, stay in order."""
  nodes = [device(i // 4, i, "gpu") for i in range(8)]
  mesh = make_mesh(1, 8, devices=nodes)
  assert [d.id for d in mesh.devices.flat] == list(range(8))
  assert mesh.axis_names == AXES
  slices = [device(i // 4, i, "tpu") for i in range(8)]
  with pytest.raises(ValueError, match="mesh.data = 1.* multiple of the 2 sl"):
    make_mesh(1, 8, devices=slices)


def sent(*words):
  """Returns axes of meshes, and bytes sent by a gradient, by kind and group."""
  words = processes.run(
    __file__, "gradients", *words, JAX_DISABLE_MOST_OPTIMIZATIONS="0"
  )
  meshes, collectives = json.loads(words)
  return meshes, {(kind, n): size for kind, n, size in collectives}


@pytest.mark.slow
def test_only_gradient_shards_cross_slices():
  """Gradients are first summed over fsdp within each slice."""
  pytest.importorskip("libtpu")
  (mesh, sampling), bytes_sent = sent("v5e:2x2*2", 2, 4, 1)
  assert mesh == {"slice": 2, "data": 1, "fsdp": 4, "expert": 1, "tensor": 1}
  assert sampling == mesh | {"fsdp": 2, "tensor": 2}
  assert bytes_sent == {
    ("all-gather", 4): 2 * MATRICES * 3 // 4,  # forward and backward
    ("reduce-scatter", 4): MATRICES * 3 // 4,
    ("all-reduce between slices", 2): MATRICES // 4,
  }


@pytest.mark.slow
def test_gradients_of_tensor_split_weights_are_scattered():
  """XLA alone would sum whole gradients if columns are split into 128 each."""
  pytest.importorskip("libtpu")
  _, bytes_sent = sent("v5e:2x4", 2, 2, 2)
  activations = bytes_sent.pop(("all-reduce", 2))
  assert activations >= 2 * ROWS // 4 * D * 2
  moved = [bytes_sent.pop(("collective-permute", 4))]
  moved.append(bytes_sent.pop(("all-gather", 2)))
  assert max(moved) <= 3 * MATRICES // 4  # once, for the optimizer
  assert bytes_sent == {("reduce-scatter", 4): MATRICES // 2 * 3 // 4}


@pytest.mark.slow
def test_equal_sides_add_gradients_by_an_all_reduce():
  """XLA:TPU's choice, even for `jax.lax.psum_scatter` (docs/models.md)."""
  pytest.importorskip("libtpu")
  _, bytes_sent = sent("v5e:4x4", 1, 16, 1)
  assert bytes_sent["all-reduce", 16] == 2 * MATRICES * 15 // 16
  assert {kind for kind, _ in bytes_sent} == {"all-gather", "all-reduce"}


def sent_for_gradients(name, data, fsdp, tensor):
  """Compiles an MLP with scanned layers; returns the results of `sent`."""
  devices = topology.machine(name).devices
  mesh = make_mesh(int(data), int(fsdp), 1, int(tensor), devices=devices)

  @jax.checkpoint
  def layer(x, w):
    w = sharding.gather(w, "layer/")
    return constrain(jnp.tanh(x @ w["gate"]) @ w["down"], "batch"), None

  def loss(params, x):
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.sum(x.astype(jnp.float32))

  stack = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.bfloat16)
  params = sharding.placed({"layers": {"gate": stack, "down": stack}}, mesh)
  rows = activation_sharding(mesh, (ROWS, D), "batch")
  x = jax.ShapeDtypeStruct((ROWS, D), jnp.bfloat16, sharding=rows)
  with jax.set_mesh(mesh):
    places = jax.tree.map(lambda x: x.sharding, params)
    gradient = jax.jit(jax.grad(loss), out_shardings=places)
    text = gradient.lower(params, x).compile().as_text()
  groups = collections.Counter()
  for c in cost.cost(hlo.parse(text), 1).collectives:
    groups[c.kind, c.group_size] += c.bytes * c.trips
  meshes = [dict(m.shape) for m in (mesh, sampling_mesh(mesh, 2))]
  return meshes, [(*group, size) for group, size in groups.items()]


if __name__ == "__main__":
  if sys.argv[1] == "gradients":
    print(json.dumps(sent_for_gradients(*sys.argv[2:])))
    sys.exit()
  for name in sys.argv[1:]:
    devices = topology.machine(name).devices
    print(name, make_mesh(devices=devices).size)
    if len(devices) > 4:
      check(devices)
