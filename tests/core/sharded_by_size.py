"""A step of a user's model with parameters sharded over eight devices.

Run with JAX_NUM_CPU_DEVICES=8; test_on_devices.py does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import grpojax

VOCAB = 32
WIDTH = 64
MIN_SIZE = 1024


class Model(nnx.Module):
  """An embedding, prefix sums, and two layers."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
    self.out = nnx.Linear(4 * WIDTH, VOCAB, rngs=rngs)

  def __call__(self, ids):
    return self.out(nnx.gelu(self.up(self.embed(ids).cumsum(1))))


def main():
  lm = grpojax.from_nnx(lambda rngs: Model(rngs))
  tx = optax.adam(1e-2)
  reward = lambda rollout, _: (rollout.completion_ids == 7).mean(-1)
  step = grpojax.make_grpo_step(
    lm, tx, reward, group_size=4, max_new_tokens=6, eos_ids=1
  )
  start = lambda key: grpojax.init_state(lm.init(key), tx, key)
  key = jax.random.key(0)
  prompts = grpojax.Prompts(jnp.full((8, 3), 2), jnp.ones((8, 3), bool))
  expected, whole = jax.jit(step)(jax.jit(start)(key), prompts)

  mesh = grpojax.make_mesh(data=1, fsdp=8)
  shapes = jax.eval_shape(start, key)
  places = grpojax.shardings(shapes, mesh, min_size=MIN_SIZE)
  state = jax.jit(start, out_shardings=places)(key)
  with jax.set_mesh(mesh):
    state, metrics = jax.jit(step, out_shardings=(places, None))(state, prompts)
  for x in jax.tree.leaves((state.params, state.opt_state)):
    split = 8 if x.size >= MIN_SIZE else 1
    for shard in x.addressable_shards:
      assert shard.data.size == x.size // split, (x.shape, x.sharding)
  large = [x for x in jax.tree.leaves(state) if x.size >= MIN_SIZE]
  assert len(large) == 9  # three matrices, and two moments of each
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, state.params, expected.params)
  jax.tree.map(close, metrics, whole)


if __name__ == "__main__":
  main()
