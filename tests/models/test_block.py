"""Windows, experts and adapters of a layer; families are in test_families."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.models.attention import two_part_attention
from grpojax.models.config import TransformerConfig
from grpojax.models.moe import LAYER, matrices_of, mixture
from grpojax.models.transformer import transformer

RNG = np.random.default_rng(0)
CONFIG = TransformerConfig(
  vocab_size=11,
  width=8,
  layers=3,
  heads=2,
  kv_heads=1,
  head_dim=4,
  mlp=6,
  local_layers=(True, True, False),
  window=3,
  experts=3,
  experts_per_token=2,
)
PROMPTS = jnp.asarray(RNG.integers(6, 11, (2, 5)))
MASK = jnp.array([[True] * 5, [True, True, False, False, False]])
IDS = jnp.asarray(RNG.integers(0, 11, (2, 2, 6)))


def random_params(lm):
  shapes = jax.eval_shape(lm.init, jax.random.key(0))
  return jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape) / 2, jnp.float32), shapes
  )


def total(lm, params):
  prefix = lm.prefill(params, PROMPTS, MASK)
  return jnp.sum(jnp.sin(lm.extend(params, prefix, IDS)[0]))


@pytest.fixture(scope="module")
def mixed():
  """Layers with and without a window, and experts: value and gradient."""
  lm = transformer(CONFIG)
  params = random_params(lm)
  run = jax.jit(jax.value_and_grad(lambda p: total(lm, p)))
  return lm, params, *run(params)


@pytest.mark.slow
def test_forward_mode_agrees_with_reverse_mode(mixed):
  lm, params, _, grad = mixed
  tangent = jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape), jnp.float32), params
  )
  _, got = jax.jit(lambda p, v: jax.jvp(lambda p: total(lm, p), (p,), (v,)))(
    params, tangent
  )
  products = jax.tree.map(lambda a, b: jnp.sum(a * b), grad, tangent)
  np.testing.assert_allclose(got, sum(jax.tree.leaves(products)), rtol=1e-3)


@pytest.mark.slow
def test_a_prompt_out_of_the_window_leaves_no_trace():
  """One layer: what a token sees is what its window holds, also packed."""
  config = dataclasses.replace(
    CONFIG, layers=1, local_layers=(True,), experts=0, experts_per_token=0
  )
  lm = transformer(config)
  params = random_params(lm)

  def run(params, ids, mask, **where):
    prefix = lm.prefill(params, PROMPTS[:1], mask)
    return lm.extend(params, prefix, ids, **where)[0]

  run = jax.jit(run)
  ids, two = jnp.arange(6).reshape(1, 1, 6), MASK[1:]
  other = params | {"embed": params["embed"].at[PROMPTS[0, 1]].add(1.0)}
  assert PROMPTS[0, 1] > 5  # it does not occur in the completion
  changed = run(other, ids, two)[0, 0] != run(params, ids, two)[0, 0]
  np.testing.assert_array_equal(changed.any(-1), [True, True, *[False] * 4])

  positions = jnp.array([[[0, 1, 2, 0, 1, 2]]])
  segments = jnp.array([[[0, 0, 0, 1, 1, 1]]])

  got = run(params, ids, two, positions=positions, segments=segments)[0, 0]
  parts = run(params, ids.reshape(1, 2, 3), two)[0]
  np.testing.assert_allclose(got, parts.reshape(6, -1), atol=1e-5)


@pytest.mark.slow
def test_a_query_that_sees_no_prompt_has_a_finite_gradient():
  q = jnp.asarray(RNG.normal(size=(1, 1, 1, 1, 2, 4)), jnp.float32)
  own, prompt = (q[:, :, :, 0], q[:, :, :, 0]), (q[:, 0, :, 0], q[:, 0, :, 0])
  seen = jnp.array([[[[True, True], [False, False]]]])

  def out(q, prompt):
    return two_part_attention(q, own, jnp.eye(2, dtype=bool), prompt, seen)

  alone = jax.jit(two_part_attention)(q, own, jnp.eye(2, dtype=bool))
  got = jax.jit(out)(q, prompt)[0, 0, 0, 0]
  np.testing.assert_array_equal(got[1], alone[0, 0, 0, 0, 1])
  assert (got[0] != alone[0, 0, 0, 0, 0]).any()
  loss = lambda *x: jnp.sum(out(*x)[..., 1, :] ** 2)
  grads = jax.jit(jax.grad(loss, (0, 1)))(q, prompt)
  assert all((g == 0).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("normalize", [False, True])
def test_a_mixture_is_the_weighted_sum_of_its_experts(normalize):
  """Of adapted ones: each has adapters of its own."""
  config = dataclasses.replace(CONFIG, normalize_experts=normalize)
  layer = {
    "router": RNG.normal(size=(8, 3)),
    "expert_gate": RNG.normal(size=(3, 8, 6)),
    "expert_up": RNG.normal(size=(3, 8, 6)),
    "expert_down": RNG.normal(size=(3, 6, 8)),
  }
  layer["router"][:, 2] = -9.0  # few tokens, or none
  whole = dict(layer)
  for name in ("expert_gate", "expert_up", "expert_down"):
    _, fan_in, fan_out = layer[name].shape
    a, b = RNG.normal(size=(3, fan_in, 2)), RNG.normal(size=(3, 2, fan_out))
    whole[name] = layer[name] + a @ b
    layer |= {f"{name}_lora_a": a, f"{name}_lora_b": b}
  x = np.abs(RNG.normal(size=(7, 8)))
  want = np.zeros_like(x)
  for i, token in enumerate(x):
    p = np.exp(token @ layer["router"])
    p /= p.sum()
    chosen = np.argsort(-p)[:2]
    for j in chosen:
      gate = np.tanh(token @ whole["expert_gate"][j])
      y = gate * (token @ whole["expert_up"][j])
      weight = p[j] / (p[chosen].sum() if normalize else 1)
      want[i] += weight * (y @ whole["expert_down"][j])
  x = x.reshape(1, 7, 1, 8)
  arrays = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x, layer))
  compiled = jax.jit(lambda x, layer: mixture(config, x, layer, jnp.tanh)[0])
  got = compiled(*arrays)
  np.testing.assert_allclose(got.reshape(7, 8), want, atol=1e-4)
  x, layer = arrays
  for number in range(3):  # the same one among the matrices of a whole stack
    whole = {
      k: jnp.stack([a if i == number else 9 * a + 1 for i in range(3)])
      for k, a in layer.items()
      if k in matrices_of(layer)
    }
    got = compiled(x, layer | whole | {LAYER: jnp.int32(number)})
    np.testing.assert_allclose(got.reshape(7, 8), want, atol=1e-4)
