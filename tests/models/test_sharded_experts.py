"""Layers of experts on meshes of eight devices.

The tests run this file as a program, because the number of devices is fixed
when jax starts.
"""

import dataclasses
import functools
import re
import sys
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_close, config_with, run_python

from grpojax.core.losses.load_balancing import load_balancing_loss
from grpojax.core.meshes import activation_spec, batch_sharding, make_mesh
from grpojax.core.types import Tokens
from grpojax.models import grouped, lora, moe, sharding
from grpojax.models.moe import LAYER, matrices_of, mixture
from grpojax.models.transformer import transformer

MESHES = (
  # data, fsdp, expert, tensor
  (8, 1, 1, 1),
  (1, 8, 1, 1),
  (1, 4, 1, 2),
  (2, 1, 4, 1),
  (1, 2, 2, 2),
)
CONFIG = config_with(
  vocab_size=16,
  width=16,
  kv_heads=2,
  mlp=8,
  tied=False,
  experts=8,
  experts_per_token=2,
)
B = 2  # the mesh also splits groups
G = 4
P = 5
S = 3
KINDS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


@functools.cache
def parameters(config):
  """Returns random parameters, and with all tokens at two experts."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32) / 6,
    jax.eval_shape(transformer(config).init, jax.random.key(0)),
  )
  # Equal logits choose the first experts.
  layers = params["layers"] | {"router": 0 * params["layers"]["router"]}
  return params, params | {"layers": layers}


def mixtures(config, params, x):
  """Applies the mixtures of all layers like `transformer`."""
  keep = sharding.all_but_gathered

  @functools.partial(jax.checkpoint, prevent_cse=False, policy=keep)
  def step(x, layer):
    layer = sharding.gather(layer, "layer/")
    return x + mixture(config, x, layer, jax.nn.silu)[0], None

  return jax.lax.scan(step, x, params["layers"])[0]


def with_gradients(config, params, x):
  y, pull = jax.vjp(functools.partial(mixtures, config), params, x)
  return y, pull(jnp.cos(y))


_ragged_dot = jax.lax.ragged_dot


@jax.custom_vjp
def as_on_tpu(rows, matrices, runs):
  """`ragged_dot` with NaN in rows outside of all runs."""
  in_runs = jnp.arange(len(rows)) < jnp.sum(runs)
  y = _ragged_dot(rows, matrices, runs)
  return jnp.where(in_runs[:, None], y, jnp.nan)


def _backward(saved, grad):
  rows, matrices, runs = saved
  in_runs = (jnp.arange(len(rows)) < jnp.sum(runs))[:, None]
  product = lambda rows, matrices: _ragged_dot(rows, matrices, runs)
  _, pull = jax.vjp(product, rows, matrices)
  rows, matrices = pull(jnp.where(in_runs, grad, 0))
  return jnp.where(in_runs, rows, jnp.nan), matrices, None


as_on_tpu.defvjp(lambda *args: (as_on_tpu(*args), args), _backward)


def compiled(function, mesh, params, x):
  spec = activation_spec(mesh, x.shape, ("batch", "group"))
  rows = jax.sharding.NamedSharding(mesh, spec)
  places = sharding.shardings(params, mesh), rows
  with jax.set_mesh(mesh):
    jitted = jax.jit(function, in_shardings=places)
    return jitted.lower(params, x).compile(), places


check_equal = functools.partial(assert_close, rtol=1e-5, atol=1e-5)


@functools.cache
def on_one_device(config, group_size):
  rng = np.random.default_rng(1)
  x = rng.normal(size=(B, group_size, S, config.width)).astype(np.float32)
  names = ("router", "expert_gate", "expert_up", "expert_down")
  arguments = [
    ({"layers": {name: params["layers"][name] for name in names}}, x)
    for params in parameters(config)
  ]
  program = jax.jit(functools.partial(with_gradients, config))
  return arguments, [program(*a) for a in arguments]


def check_mixtures(sizes, config=CONFIG, group_size=G):
  """Compares with a single device, for two routings."""
  arguments, expected = on_one_device(config, group_size)
  function = functools.partial(with_gradients, config)
  program, places = compiled(function, make_mesh(*sizes), *arguments[0])
  for argument, want in zip(arguments, expected, strict=True):
    check_equal(program(*jax.device_put(argument, places)), want)
  return program.as_text()


def collectives(text):
  """Counts the collectives of a program by (operation, shape)."""
  counts = Counter()
  for line in text.splitlines():
    match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
    for shape in re.findall(r"\w+\[[\d,]*\]", match[1]) if match else ():
      counts[match[2], shape] += 1
  return counts


def check_exchanges(text):
  """With fsdp = 2 and expert = 4, four devices share 12 of the 24 tokens."""
  exchanges = collectives(text)
  matrices = "f32[16,8]", "f32[2,16,8]", "f32[2,8,16]"  # router, experts
  gathered_experts = {("all-gather", shape) for shape in matrices}
  # On TPUs, gradients are summed by a reduce-scatter.
  summed_gradients = {("all-reduce", shape) for shape in matrices}
  tokens = {
    ("all-gather", "f32[12,16]"),  # also of gradients
    ("all-gather", "f32[12,2]"),  # weights of a token's experts
    ("all-gather", "s32[12,2]"),
    ("reduce-scatter", "f32[3,16]"),
    ("reduce-scatter", "f32[3,2]"),
  }
  # jax 0.7 adds a sum over an axis of size 1.
  del exchanges["all-reduce", "f32[1,1,3,16]"]
  expected = gathered_experts | summed_gradients | tokens
  assert set(exchanges) == expected, exchanges


def check_decoding_exchanges():
  """A token per sample: four of eight in a group of devices."""
  (params, x), _ = on_one_device(CONFIG, G)[0]
  function = functools.partial(mixtures, CONFIG)
  program, _ = compiled(function, make_mesh(1, 2, 4, 1), params, x[:, :, :1])
  exchanges = collectives(program.as_text())
  assert {x for x in exchanges if not x[1].endswith(("16,8]", "8,16]"))} == {
    ("all-gather", "f32[4,16]"),
    ("all-gather", "f32[4,2]"),
    ("all-gather", "s32[4,2]"),
    ("reduce-scatter", "f32[1,16]"),
  }, exchanges


def check_whole_stacks(sizes):
  """Passes matrices of whole stacks, like decoding on TPUs."""
  (params, x), _ = on_one_device(CONFIG, G)[0]
  want = on_one_device(CONFIG, G)[1][0][0]

  def of_stack(params, x):
    layers = sharding.gather(params["layers"], "layers/")
    whole = {name: layers[name] for name in matrices_of(layers)}
    for i in range(CONFIG.layers):
      layer = whole | {"router": layers["router"][i], LAYER: jnp.int32(i)}
      x = x + mixture(CONFIG, x, layer, jax.nn.silu)[0]
    return x

  program, places = compiled(of_stack, make_mesh(*sizes), params, x)
  check_equal(program(*jax.device_put((params, x), places)), want)


def check_layer_kernel():
  """Decodes on meshes with the TPU's kernel, interpreted."""
  interpreted = functools.partial(grouped.layer_kernel, interpret=True)
  # The interpreter mixes values that vary along different axes.
  with (
    mock.patch.object(moe, "_TRACKED", False),
    mock.patch.object(grouped, "layer_product", interpreted),
  ):
    check_whole_stacks((1, 2, 2, 2))
    check_whole_stacks((2, 1, 4, 1))


def check_models():
  """Checks models with adapters: training with each remat, and decoding."""
  check_mixtures((1, 2, 2, 2), dataclasses.replace(CONFIG, experts=5))
  check_whole_stacks((1, 2, 2, 2))
  check_whole_stacks((2, 1, 4, 1))
  prompts = jnp.arange(B * P).reshape(B, P) * 7 % 15
  mask = jnp.arange(P) < P - jnp.arange(B)[:, None]
  ids = jnp.arange(B * G * S).reshape(B, G, S) * 5 % 15
  batch = prompts, mask, ids

  def train(lm, params, prompts, mask, ids):
    tokens = Tokens(
      *(prompts, mask, ids),
      load_weights=jnp.ones(ids.shape),
      prompt_load_weights=mask * 1.0,
    )

    def hidden(params):
      model, params = lm.prepared(params, longest=None)
      _, y, load = model.forward(params, tokens)
      return y, load_balancing_loss(load)

    y, pull = jax.vjp(hidden, params)
    return y, pull(jax.tree.map(jnp.cos, y))

  def decode(lm, params, prompts, mask, ids):
    model, params = lm.prepared(params, longest=prompts.shape[1] + S)
    prefix = model.prefill(params, prompts, mask)

    def step(carry):
      i, cache, out = carry
      token = jax.lax.dynamic_slice_in_dim(ids, i, 1, axis=2)
      at = jnp.full_like(token, i)
      new, cache, _ = model.extend(params, prefix, token, cache, at)
      out = jax.lax.dynamic_update_slice_in_dim(out, new, i, axis=2)
      return i + 1, cache, out

    out = jnp.zeros((*ids.shape, CONFIG.width))
    start = 0, model.init_cache(B, G, S), out
    return jax.lax.while_loop(lambda carry: carry[0] < S, step, start)[2]

  targets = "layers/(q|down|expert_.*)"
  adapters = lora.abstract(parameters(CONFIG)[0], 2, targets)
  rng = np.random.default_rng(2)
  draw = lambda x: rng.normal(size=x.shape).astype(np.float32) / 4
  adapters = jax.tree.map(draw, adapters)
  models = [lora.attach(p, adapters, 2) for p in parameters(CONFIG)]
  trainings = [(train, x) for x in ("none", "selective", "full")]
  for function, remat in [*trainings, (decode, "none")]:
    program = functools.partial(function, transformer(CONFIG, remat=remat))
    expected = [jax.jit(program)(p, *batch) for p in models]
    for sizes in MESHES:
      mesh = make_mesh(*sizes)
      rows = batch_sharding(mesh, B)
      places = sharding.shardings(models[0], mesh), rows, rows, rows
      with jax.set_mesh(mesh):
        jitted = jax.jit(program, in_shardings=places)
        for params, want in zip(models, expected, strict=True):
          check_equal(jitted(*jax.device_put((params, *batch), places)), want)


@pytest.mark.slow
def test_results_and_exchanges():
  run_python(8, __file__)


@pytest.mark.long
def test_whole_models():
  run_python(8, __file__, "models")


def main():
  jax.lax.ragged_dot = as_on_tpu
  for sizes in MESHES:
    text = check_mixtures(sizes)
    if sizes == (1, 8, 1, 1):  # gathered matrices of a single layer
      assert "f32[2,8,2,8]" in text and "f32[2,8,16,8]" not in text
  check_exchanges(check_mixtures((1, 2, 4, 1)))
  check_decoding_exchanges()
  check_layer_kernel()
  # Groups of three and F = 7 cannot be split.
  check_mixtures((1, 2, 2, 2), dataclasses.replace(CONFIG, mlp=7), group_size=3)


if __name__ == "__main__":
  check_models() if sys.argv[1:] else main()
