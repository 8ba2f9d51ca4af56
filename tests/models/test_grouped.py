"""Products of runs of rows with different matrices, and their kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpojax.aot import cost, hlo, topology
from grpojax.models import grouped
from grpojax.models.grouped import grouped_product


def by_hand(rows, matrices, runs):
  """Multiplies run by run."""
  ends = np.cumsum(runs)
  parts = zip(ends - runs, ends, matrices, strict=True)
  return jnp.concatenate([rows[a:b] @ w for a, b, w in parts])


RUNS = {
  "empty runs and unused rows": (96, (10, 0, 53, 1, 0)),
  "longer than a tile": (512, (200, 0, 300)),
  "only empty runs": (16, (0, 0)),
  "less than a tile": (7, (2, 0, 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_values_and_derivatives(monkeypatch, name, kernel):
  if kernel:
    monkeypatch.setattr(
      jax.lax,
      "platform_dependent",
      lambda *args, cuda, default: cuda(*args, interpret=True),
    )
  count, runs = RUNS[name]
  rng = np.random.default_rng(0)
  used = sum(runs)
  shapes = (count, 48), (len(runs), 48, 160)
  args, tangents = (
    tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    for _ in range(2)
  )

  def loss(product, rows, matrices):
    return jnp.sum(jnp.sin(product(rows, matrices)[:used] / 7))

  def ours(rows, matrices):
    return grouped_product(rows, matrices, jnp.asarray(runs, jnp.int32))

  ours, plain = (
    functools.partial(loss, product)
    for product in (ours, functools.partial(by_hand, runs=np.array(runs)))
  )
  derive = lambda f, *of: jax.jit(jax.value_and_grad(f, *of))(*args)
  value, grads = derive(ours, (0, 1))
  want, (d_rows, d_matrices) = derive(plain, (0, 1))
  close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
  close(value, want)
  close(grads[0][:used], d_rows[:used])
  close(grads[1], d_matrices)
  for i, expected in enumerate((d_rows[:used], d_matrices)):
    _, alone = derive(ours, i)  # the other argument is frozen
    close(alone[: len(expected)], expected)
  along = lambda f: jax.jit(lambda *x: jax.jvp(f, *x)[1])(args, tangents)
  close(along(ours), along(plain))


@pytest.mark.parametrize("name", RUNS)
def test_a_layer_of_a_stack(monkeypatch, name):
  """Tiles of several runs, and columns in three blocks; layer 2 is of NaN."""
  monkeypatch.setattr(grouped, "_BYTES", 4 * 48 * 128)
  count, runs = RUNS[name]
  rng = np.random.default_rng(0)
  rows = jnp.asarray(rng.normal(size=(count, 48)), jnp.float32)
  stack = rng.normal(size=(3, len(runs), 48, 300)).astype(np.float32)
  stack[2] = np.nan
  for layer in range(2):
    args = jnp.int32(layer), rows, stack, jnp.asarray(runs, jnp.int32)
    expected = by_hand(rows, stack[layer], np.array(runs))
    for product in (
      functools.partial(grouped.layer_kernel, interpret=True),
      grouped.layer_product,
    ):
      y = jax.jit(product)(*args)[: sum(runs)]
      np.testing.assert_allclose(y, expected, atol=2e-5, rtol=2e-5)


def test_a_gpu_multiplies_each_row_with_one_matrix(h100):
  """XLA would need 32 times the operations, and a copy of the rows."""
  pytest.importorskip("jax_plugins.xla_cuda13")
  (device,) = topology.machine("h100:1").devices
  place = NamedSharding(Mesh([device], ("x",)), PartitionSpec())
  n = 4096
  x = 32
  d = 512
  f = 256

  def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  def gradients(rows, matrices, runs):
    y, pull = jax.vjp(lambda *x: grouped_product(*x, runs), rows, matrices)
    return pull(y)

  lowered = jax.jit(gradients).lower(
    array(n, d), array(x, d, f), array(x, dtype=jnp.int32)
  )
  compiled = lowered.compile()
  assert cost.cost(hlo.parse(compiled.as_text()), 1).flops == 3 * 2 * n * d * f
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2 * n * f
