"""Packed steps on eight devices, against unpacked steps on a single device.

Run with JAX_NUM_CPU_DEVICES=8; test_on_devices.py does.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpojax.core import meshes, packing, rows
from grpojax.core.batch import make_batch
from grpojax.core.objective import Objective
from grpojax.core.packing import layout as packing_layout
from grpojax.core.packing import packed_logprobs
from grpojax.core.step import init_state
from grpojax.core.types import Rollout
from grpojax.core.update import UpdateOptions, make_update
from grpojax.models import sharding
from grpojax.models.transformer import TransformerConfig, transformer

B = 8
G = 6
P = 3
T = 16
V = 12
ENTROPY = dict(entropy_coef=0.3, top_entropy_quantile=0.4)
# Options by the number of minibatches. Packed rows are split, as micro-batches
# are small.
RUNS = {1: {}, 2: ENTROPY}


def samples(rng):
  lengths = np.minimum(rng.geometric(0.3, (B, G)), T // 2)
  mask = jnp.asarray(np.arange(T) < lengths[..., None])
  return lengths, Rollout(
    prompt_ids=jnp.asarray(rng.integers(0, V, (B, P))),
    prompt_mask=jnp.ones((B, P), bool),
    completion_ids=jnp.asarray(rng.integers(0, V, (B, G, T))),
    completion_mask=mask,
    logprobs=jnp.where(mask, -2.0, 0.0),
    finished=jnp.ones((B, G), bool),
  )


def run(lm, params, drawn, rewards, layout, cuts, entropy):
  """Returns the parameters after a step of two epochs, and its metrics."""
  tx = optax.sgd(0.1)
  options = UpdateOptions(epochs=2, **cuts)
  objective = Objective(beta=0.1, **entropy)
  update = make_update(lm, tx, objective, options)

  @jax.jit
  def step(params, drawn, layout):
    half = jax.tree.map(lambda x: x / 2, params)
    others = {"options": options, "ref_params": half, "packing": layout}
    batch = make_batch(lm, drawn, rewards, objective, **others)
    state = init_state(params, tx, jax.random.key(5))
    state, metrics = update(state, rows.constrain(batch))
    return state.params, metrics

  return jax.device_get(step(params, drawn, layout))


def place(mesh_, tree):
  return meshes.place(tree, mesh_, "batch")


def collectives(text):
  return set(re.findall(r"all-\w+|collective-\w+|reduce-scatter", text))


def check_pack(mesh_, drawn, layout):
  """Splitting and joining need no communication."""
  ids, layout = place(mesh_, (drawn.completion_ids, layout))
  record = lambda ids: Rollout(ids[:, 0], None, ids, None, None, None)
  split = lambda ids, x: packing.split(record(ids), x)[0].completion_ids
  both = jax.jit(lambda *x: packing.join(split(*x), x[1], (B, G)))
  text = both.lower(ids, layout).compile().as_text()
  assert not collectives(text), collectives(text)


def check_forward(mesh_, lm, params, drawn, layout):
  """The forward and backward pass only sum gradients, outside of loops."""
  params = jax.device_put(params, sharding.shardings(params, mesh_))
  data = place(mesh_, (drawn.prompt_ids, drawn.prompt_mask))
  ids, layout = place(mesh_, (drawn.completion_ids, layout))

  @jax.jit
  def gradient(params, prompts, ids, layout):
    samples = Rollout(*prompts, ids, None, None, None)
    split = packing.split(samples, layout)
    samples, _, packed = jax.tree.map(lambda x: x[0], split)

    def total(params):
      args = lm, params, samples.tokens, packed
      return jnp.sum(packed_logprobs.completion_logprobs(*args)[0])

    return jax.grad(total)(params)

  text = gradient.lower(params, data, ids, layout).compile().as_text()
  sent = collectives(text)
  assert sent == {"all-reduce"}, sent  # of the gradients
  loops = set(re.findall(r"\bbody=%?([\w.-]+)", text))
  computations = re.findall(r"\n%?([\w.-]+) [^\n]*{\n(.*?)\n}", text, re.DOTALL)
  sums = [body for name, body in computations if name in loops]
  sums = [body for body in sums if " all-reduce(" in body]
  assert loops and not sums, sums


def main():
  rng = np.random.default_rng(0)
  shape = dict(width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24)
  lm = transformer(TransformerConfig(V, **shape))
  params = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, jnp.float32),
    jax.eval_shape(lm.init, jax.random.key(0)),
  )
  lengths, drawn = samples(rng)
  rewards = jnp.asarray(rng.normal(size=(B, G)))
  mesh_ = meshes.make_mesh(data=2, fsdp=2, tensor=2)
  for minibatches, entropy in RUNS.items():
    cuts = dict(minibatches=minibatches, micro_batches=4)
    expected = run(lm, params, drawn, rewards, None, cuts, entropy)
    with jax.set_mesh(mesh_):
      layout = packing_layout.plan(lengths, T, np.full(B, P), P, **cuts)
      assert layout.micro_batches() == 2 * minibatches
      check_pack(mesh_, drawn, layout)
      placed = jax.device_put(params, sharding.shardings(params, mesh_))
      data = place(mesh_, (drawn, rewards, layout))
      actual = run(lm, placed, *data, cuts, entropy)
    close = lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 2e-5)
    jax.tree.map(close, actual, expected)
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), actual[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-3
  for sizes in (dict(data=4, tensor=2), dict(data=8)):
    mesh_ = meshes.make_mesh(**sizes)
    with jax.set_mesh(mesh_):
      layout = packing_layout.plan(lengths, T, np.full(B, P), P)
      check_forward(mesh_, lm, params, drawn, layout)
  with jax.set_mesh(mesh_):
    # A single prompt's group is sharded, which packing does not support.
    fewer = np.repeat(lengths[:1], 4, axis=1)
    assert packing_layout.plan(fewer, T, np.full(1, P), P) is None


if __name__ == "__main__":
  main()
