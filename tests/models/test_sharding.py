"""Meshes and the table of shardings.

Run as a program with four devices, it compares meshes with a single device.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_models import (
  OTHER_FEATURES,
  assert_close,
  config_with,
  prompts_of,
  random_params,
  run_python,
)

from grpojax.aot import cost, hlo
from grpojax.core import meshes
from grpojax.core.optim import OPTIMIZERS, scale_by_rounded_adam
from grpojax.core.types import Tokens
from grpojax.models import sharding
from grpojax.models.attention import Visibility
from grpojax.models.cache import KeysValues, PromptKeysValues
from grpojax.models.cpu import float32_einsum, matmul
from grpojax.models.kernel_attention import kernel_attention
from grpojax.models.transformer import transformer

EXPERTS = dict(experts=4, experts_per_token=2, normalize_experts=True)
ONE = jax.devices()[:1]


def check_meshes():
  sizes = dict(data=4, fsdp=1, expert=1, tensor=1)
  assert dict(meshes.make_mesh().shape) == sizes
  with pytest.raises(ValueError, match="of 3 devices, and there are 4"):
    meshes.make_mesh(-1, 3)
  with pytest.raises(ValueError, match="use axes of at least 1"):
    meshes.make_mesh(0, 1, 1)
  mesh = meshes.make_mesh(1, 2, 1, -1)
  assert dict(mesh.shape) == dict(data=1, fsdp=2, expert=1, tensor=2)
  assert meshes.batch_sharding(mesh, 8).shard_shape((8, 5)) == (4, 5)
  assert meshes.batch_sharding(mesh, 3).spec == P(None)  # 3 is odd


def check_optimizers():
  """Rounding has the same random bits on any mesh; Adafactor sends vectors."""
  mesh = meshes.make_mesh(1, 2, 1, 2)
  tx = scale_by_rounded_adam(0.9, 0.999, jax.random.key(3))
  few = {"embed": jnp.ones((6, 4)) / 3}
  state = tx.init(few)
  specs = sharding.shardings((few, state), mesh)
  assert specs[1].mu == specs[1].nu == specs[0]
  update = jax.jit(tx.update, in_shardings=specs, out_shardings=specs)
  assert_close(update(few, state), jax.jit(tx.update)(few, state), rtol=0)
  options = dict(moments_dtype="float32", seed=0)
  tx = OPTIMIZERS["adafactor"](b1=0, b2=0.99, **options)
  layers = {"gate": jnp.ones((3, 128, 256)), "down": jnp.ones((3, 256, 128))}
  layers["expert_up"] = jnp.ones((3, 4, 128, 256))
  large = {"embed": jnp.ones((256, 192)), "layers": layers}
  for sizes in ((1, 2, 1, 2), (1, 2, 2, 1)):
    mesh = meshes.make_mesh(*sizes)
    args = sharding.placed((large, jax.eval_shape(tx.init, large), large), mesh)
    place = jax.tree.map(lambda x: x.sharding, args)
    program = jax.jit(tx.update, in_shardings=place, out_shardings=place[:2])
    text = program.lower(*args).compile().as_text()
    sent = cost.cost(hlo.parse(text), 1).collectives
    assert 0 < max(c.bytes for c in sent) < 256 * 128 * 4 // 4, sent


def head_gradient(lm):
  def loss(params, hidden):
    model, params = lm.prepared(params, longest=None)
    return jnp.sum(jnp.sin(model.unembed(params, hidden)))

  return jax.value_and_grad(loss, argnums=(0, 1))


SENT = "all-reduce", "all-gather", "all-to-all", "permute", "reduce-scatter"


def check_heads(sizes, b, g, tied):
  """Each device multiplies its rows with its copy of the head."""
  mesh = meshes.make_mesh(*sizes)
  lm = transformer(config_with(vocab_size=16, heads=4, kv_heads=2, tied=tied))
  params = jax.jit(lm.init)(jax.random.key(1))
  hidden = jax.random.normal(jax.random.key(2), (b, g, 5, 8))
  gradient = head_gradient(lm)
  alone = gradient(params, hidden)
  with jax.set_mesh(mesh):
    place = sharding.shardings(params, mesh)
    rows = meshes.activation_sharding(mesh, hidden.shape, "batch", "group")
    args = jax.device_put((params, hidden), (place, rows))
    split = jax.jit(gradient, out_shardings=(None, (place, rows)))(*args)
    parts = sharding.row_shards(b, g)
    if parts is not None:
      text = jax.jit(parts.split).lower(args[1]).compile().as_text()
      assert not [name for name in SENT if name in text]
      back = jax.jit(lambda x: parts.join(parts.split(x)))(args[1])
      np.testing.assert_array_equal(back, hidden)
    assert (parts is None) == (b * g == 6 and 4 in sizes)
  assert_close(split, alone, atol=1e-5)


def check_products(b, g):
  """Samples stay on their devices even if axes of products are merged."""

  def total(x, q, keys, w):
    logits = float32_einsum("bkgrse,bkpe->bkgrsp", q, keys)
    return jnp.sum(matmul(x, w) ** 2) + jnp.sum(logits**2)

  gradient = jax.grad(total, range(4))
  shapes = (b, g, 5, 4), (b, 2, g, 2, 5, 4), (b, 2, 6, 4), (4, 6)
  args = [jax.random.normal(jax.random.key(i), x) for i, x in enumerate(shapes)]
  names = ("batch", "group"), ("batch", None, "group"), ("batch",), ()
  mesh = meshes.make_mesh(2, devices=jax.devices()[:2])
  with jax.set_mesh(mesh):
    place = tuple(
      meshes.activation_sharding(mesh, x.shape, *axes)
      for x, axes in zip(args, names, strict=True)
    )
    program = jax.jit(gradient, in_shardings=place, out_shardings=place)
    text = program.lower(*args).compile().as_text()
    assert not [name for name in SENT[1:] if f" {name}" in text]
    assert " all-reduce" in text  # of the gradient of w
    split = program(*jax.device_put(args, list(place)))
  assert_close(split, gradient(*args), rtol=1e-4)


def check_kernels(sizes, b, g, k, r):
  """Kernels get whole rows and whole key heads."""
  shapes = (b, g, k, r, 20, 4), (b, g, k, 20, 4), (b, k, 20, 4)
  normal = lambda i: jax.random.normal(jax.random.key(i), shapes[i // 2])
  row = KeysValues(normal(2), normal(3))
  args = normal(0), row, PromptKeysValues(normal(4), normal(5))
  positions = jnp.broadcast_to(jnp.arange(20) + 20, (b, g, 20))
  seen = Visibility(positions, None, jnp.ones((b, 20), bool), False)

  def total(q, row, prompt):
    out = kernel_attention(q, row, prompt, seen, platform="cpu")
    return jnp.sum(jnp.sin(out) * jnp.arange(out.size).reshape(out.shape))

  alone = jax.jit(jax.grad(total, (0, 1, 2)))(*args)
  with jax.set_mesh(meshes.make_mesh(*sizes)):
    split = jax.jit(jax.grad(total, (0, 1, 2)))(*args)
  assert_close(split, alone, atol=1e-3, rtol=1e-4)


def check_features():
  """Features of a layer have the same gradients on a mesh."""
  sizes = dict(vocab_size=16, heads=4, kv_heads=2)
  for features in (OTHER_FEATURES, OTHER_FEATURES | EXPERTS):
    lm = transformer(config_with(**sizes, **features))
    params = random_params(lm)
    rng = np.random.default_rng(0)
    prompts = prompts_of(rng, (3, 5, 2, 4), 16)
    ids = jnp.asarray(rng.integers(0, 16, (4, 2, 6)))
    batch = Tokens(prompts.prompt_ids, prompts.prompt_mask, ids)

    def loss(params, batch, lm=lm):
      model, params = lm.prepared(params, longest=None)
      logits = model.unembed(params, model.forward(params, batch).hidden)
      return jnp.sum(jax.nn.log_softmax(logits)[..., 3])

    gradient = jax.jit(jax.grad(loss))
    alone = gradient(params, batch)
    for mesh in (meshes.make_mesh(1, 2, 1, 2), meshes.make_mesh(1, 1, 2, 2)):
      with jax.set_mesh(mesh):
        placed = jax.device_put(params, sharding.shardings(params, mesh))
        split = jax.jit(jax.grad(loss))(placed, batch)
      assert_close(split, alone, rtol=1e-3, atol=1e-4)


def main():
  assert jax.device_count() == 4
  check_meshes()
  check_optimizers()
  for tied in (True, False):
    check_heads((2, 2, 1, 1), 4, 3, tied)  # prompts are split
    check_heads((2, 2, 1, 1), 2, 6, tied)  # also groups
    check_heads((1, 2, 1, 2), 3, 2, tied)  # groups and the vocabulary
    check_heads((1, 4, 1, 1), 3, 2, tied)  # rows cannot be split
  check_features()
  check_products(2, 3)  # prompts are split
  check_products(3, 2)  # samples are split
  check_kernels((2, 1, 1, 2), 2, 3, 2, 1)  # prompts and key heads
  check_kernels((2, 1, 1, 2), 1, 2, 1, 2)  # samples, heads of a key head
  check_kernels((1, 1, 1, 4), 1, 1, 2, 1)  # no axis can be split


@pytest.mark.slow
def test_on_four_devices():
  run_python(4, __file__)


def test_row_shards_have_the_order_of_the_devices(monkeypatch):
  """Here a later axis splits the prompts and an earlier axis the groups."""
  monkeypatch.setattr(sharding, "_row_axes", lambda: {"data": 2, "fsdp": 3})
  parts = sharding.row_shards(3, 4)
  x = np.arange(12).reshape(3, 4)
  cut = [[x[f, 2 * d], x[f, 2 * d + 1]] for d in range(2) for f in range(3)]
  np.testing.assert_array_equal(parts.join(jnp.asarray(cut)), x)


def test_specs_of_parameters_state_and_statistics():
  mesh = jax.sharding.AbstractMesh((1, 2, 1, 2), meshes.AXES)
  params = {
    "embed": ((6, 4), P("tensor", "fsdp")),
    "head": ((4, 6), P("fsdp", "tensor")),
    "final_norm": ((4,), P()),
    "layers/q": ((3, 4, 8), P(None, "fsdp", "tensor")),
    "layers/k": ((3, 4, 3), P(None, "fsdp", None)),
    "layers/o": ((3, 8, 4), P(None, ("tensor", "fsdp"))),
    "layers/q_bias": ((3, 8), P(None, "tensor")),
    "layers/o_bias": ((3, 4), P()),
    "layers/o/a": ((2, 16, 4), P(None, "tensor")),  # an adapter
    "unembed": ((4,), P()),  # no rule
  }
  for path, (shape, spec) in params.items():
    for start in ("", "params/", "opt_state/1/0/mu/"):
      assert sharding.spec_for(start + path, shape, mesh) == spec, path
  tree = jax.eval_shape(lambda: {"embed": jnp.ones((6, 4)), "count": 0})
  placed = sharding.placed(tree, mesh)
  assert placed["embed"].sharding.spec == P("tensor", "fsdp")
  assert placed["count"].sharding.spec == P()
  assert sharding.shard_bytes(placed) == 4 * (3 * 2 + 1)
  # Only experts' statistics are split.
  assert sharding.spec_for("0/v_row/layers/q", (2, 128), mesh) == P()
  experts = sharding.spec_for("0/v_row/layers/expert_up", (2, 4, 128), mesh)
  assert experts == P(None, "expert")


def test_a_matrix_without_a_rule_is_refused():
  mesh = meshes.make_mesh(devices=ONE)
  params = {"layers": {"q": jnp.ones((2, 4, 4)), "mixer": jnp.ones((2, 4, 4))}}
  with pytest.raises(ValueError, match="no sharding rule for unembed of"):
    sharding.spec_for("unembed", (4, 4), mesh)
  message = r"layers/mixer of shape \(2, 4, 4\): add a rule to RULES"
  for tree in (params, optax.adam(1e-3).init(params)):
    with pytest.raises(ValueError, match=message):
      sharding.shardings(tree, mesh)
  rules = ((r"layers/mixer", P()), *sharding.RULES)
  specs = sharding.shardings(params, mesh, rules)["layers"]
  assert specs["mixer"].spec == P() != specs["q"].spec


def test_optimizer_states_have_the_specs_of_their_parameters():
  mesh = meshes.make_mesh(devices=ONE)
  config = config_with(
    qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, post_norms=True
  )
  params = jax.eval_shape(transformer(config).init, jax.random.key(0))
  matrices = jax.tree.map(
    lambda x: optax.contrib.MuonDimensionNumbers(1, 2) if x.ndim == 3 else None,
    params,
  )
  muon = optax.contrib.muon(
    1e-2, ns_coeffs="dion", muon_weight_dimension_numbers=matrices
  )
  specs = sharding.shardings(params, mesh)
  rounded = scale_by_rounded_adam(0.9, 0.95, jax.random.key(0))
  options = dict(moments_dtype="float32", seed=0)
  factored = OPTIMIZERS["adafactor"](b1=0.9, b2=0.95, **options)
  for tx in (optax.adamw(1e-3), rounded, factored, muon):
    state = sharding.shardings(jax.eval_shape(tx.init, params), mesh)
    moments = {
      jax.tree_util.keystr(path, simple=True, separator="/"): place
      for path, place in jax.tree_util.tree_leaves_with_path(state)
    }
    for name, place in traverse_util.flatten_dict(specs, sep="/").items():
      key = "v" if tx is factored else "mu"
      mirrored = [v for k, v in moments.items() if k.endswith(f"{key}/{name}")]
      assert mirrored == [place], name
  labels = dataclasses.replace(config, labels=2)
  score = jax.eval_shape(transformer(labels).init, jax.random.key(0))
  assert sharding.shardings(score, mesh)["score"].spec == P()


def test_activations_are_split_by_axes_that_divide_them():
  types = (AxisType.Auto,) * 4
  sizes = (2, 4, 1, 3)
  mesh = jax.sharding.AbstractMesh(sizes, meshes.AXES, axis_types=types)
  spec = lambda shape, *names: meshes.activation_spec(mesh, shape, names)
  both = ("batch", "group", None)
  assert spec((8, 4, 7), *both) == P(("data", "fsdp"), None, None)
  assert spec((2, 4, 7), *both) == P(("data",), ("fsdp",), None)
  # 2 prompts are left for 4 devices.
  assert spec((4, 3, 7), *both) == P(("data",), None, None)
  assert spec((1, 8, 7), *both) == P(None, ("data", "fsdp"), None)
  heads = ("batch", "group", "kv_heads", "query_heads")
  assert spec((8, 1, 6, 3), *heads)[2:] == ("tensor", None)
  assert spec((8, 1, 2, 3), *heads)[2:] == (None, "tensor")
  assert spec((8, 1, 2, 7), *heads)[2:] == (None, None)
  with pytest.raises(KeyError, match="rows"):
    spec((6, 8), "batch", "rows")


def test_sampling_mesh_has_the_same_devices():
  devices = np.array([jax.devices()[0]] * 8).reshape(1, 4, 1, 2)
  mesh = jax.sharding.Mesh(devices, meshes.AXES)
  expected = {0: (1, 4, 1, 2), 4: (1, 2, 1, 4), 1: (1, 8, 1, 1)}
  for tensor, sizes in expected.items():
    assert meshes.sampling_mesh(mesh, tensor).axis_sizes == sizes
  # Two axes still split rows: an axis of 64 does not divide 32.
  devices = np.array([jax.devices()[0]] * 64).reshape(2, 16, 1, 2)
  mesh = meshes.sampling_mesh(jax.sharding.Mesh(devices, meshes.AXES), 1)
  assert mesh.axis_sizes == (2, 32, 1, 1)
  meshes.check_rows(mesh, 32, rollout=32)


@pytest.mark.skipif(
  jax.__version_info__ < (0, 8), reason="constrains on meshes of devices only"
)
@pytest.mark.parametrize("kind", ["Explicit", "Manual"])
def test_axes_taken_by_the_user_are_not_constrained(kind):
  lm = transformer(config_with(kv_heads=2, mlp=8))
  params = jax.eval_shape(lm.init, jax.random.key(0))
  types = (getattr(AxisType, kind), AxisType.Auto)
  for names in (("fsdp", "tensor"), ("tensor", "fsdp")):
    mesh = jax.sharding.AbstractMesh((2, 2), names, axis_types=types)
    with jax.sharding.use_abstract_mesh(mesh):
      text = str(jax.make_jaxpr(sharding.gather)(params))
    specs = re.findall(r"spec=P\(.*?\)\)", text)
    assert not any(names[0] in spec for spec in specs)
    assert any(names[1] in spec for spec in specs)


if __name__ == "__main__":
  main()
