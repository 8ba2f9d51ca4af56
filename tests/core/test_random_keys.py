"""Random keys of any JAX implementation are converted to threefry keys."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import grpojax
from grpojax.core.decoding import chunks
from grpojax.core.decoding.sampling import sample
from grpojax.core.packing.micro_batches import draw_orders
from grpojax.core.random_keys import random_key, seed_key
from grpojax.core.rollout import rollout
from grpojax.core.step import init_state, make_grpo_step
from grpojax.core.types import Prompts

PROMPTS = Prompts(
  jnp.ones((4, 2), jnp.int32), jnp.ones((4, 2), bool), jnp.arange(4)
)
SIZES = {"group_size": 2, "max_new_tokens": 3, "eos_ids": (0,)}


LM = grpojax.from_apply(  # a table of the next token's logits
  lambda params, ids, *_: params[ids], lambda key: jnp.zeros((9, 9))
)
TABLE = LM.init(None)


def trained(key):
  tx = optax.sgd(1.0)
  reward = lambda samples, _: jnp.sum(samples.completion_ids, -1) * 1.0
  options = grpojax.UpdateOptions(epochs=2, minibatches=2)
  step = make_grpo_step(LM, tx, reward, update=options, **SIZES)
  return step(init_state(TABLE, tx, key), PROMPTS)[0].params


DECODER = grpojax.transformer(grpojax.TransformerConfig(9, 4, 1, 1, 1, 4, 4))
LINEN = grpojax.from_linen(nn.Embed(11, 4))
NNX = grpojax.from_nnx(lambda rngs: nnx.Embed(11, 4, rngs=rngs))
DRAWS = {
  "token": lambda key: sample(key, jnp.zeros(999))[0],
  "seeds of episodes": lambda key: chunks.episode_seeds(key, shape=(2, 2)),
  "orders": lambda key: draw_orders(key, 8, 4, 4)[1:],
  "rollout": lambda key: (
    rollout(LM, TABLE, PROMPTS, key, **SIZES).completion_ids
  ),
  "transformer": lambda key: DECODER.init(key)["layers"]["q"],
  "linen": lambda key: LINEN.init(key)["embedding"],
  "nnx": lambda key: NNX.init(key)["embedding"],
}


@pytest.mark.parametrize(
  "impl", ["rbg", pytest.param("unsafe_rbg", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  "name", [*DRAWS, pytest.param("step", marks=pytest.mark.slow)]
)
def test_each_row_draws_from_its_key_as_threefry(name, impl):
  draw = jax.jit(DRAWS.get(name, trained))
  keys = jax.random.split(jax.random.key(7, impl=impl), 3)
  expected = [draw(random_key(key)) for key in keys]
  np.testing.assert_allclose(jax.vmap(draw)(keys), expected, atol=1e-6)
  assert len(np.unique(np.reshape(expected, (3, -1)), axis=0)) == 3
  with jax.default_prng_impl(impl):
    np.testing.assert_allclose(draw(keys[1]), expected[1], atol=1e-6)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_equal_keys_become_equal_threefry_keys(impl):
  words = lambda key: jax.random.key_data(key).tolist()
  key = jax.random.key(7, impl=impl)
  with jax.default_prng_impl(impl):
    assert words(seed_key(7)) == words(jax.random.key(7, impl="threefry2x32"))
    for raw in (jax.random.PRNGKey(7), np.asarray(jax.random.PRNGKey(7))):
      assert words(random_key(raw)) == words(random_key(key))
    seeded = seed_key(7)
    for same in (seeded, jax.random.key_data(seeded)):
      assert words(random_key(same)) == words(seeded)
  data = jax.random.key_data(key).at[3].add(1)
  changed = jax.random.wrap_key_data(data, impl=impl)
  assert words(random_key(changed)) != words(random_key(key))
  assert random_key(key).dtype == seeded.dtype


def test_only_random_keys_makes_keys():
  root = pathlib.Path(grpojax.__file__).parent
  makes = re.compile(r"random\.(key|PRNGKey)\(|nnx\.Rngs\(\d")
  result = {p.name for p in root.rglob("*.py") if makes.search(p.read_text())}
  assert result == {"random_keys.py", "grpo_in_one_file.py"}
