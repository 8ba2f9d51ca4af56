"""Windows, experts and adapters of a layer; families are in test_families."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config_with, normal, prompts_of, random_params

from grpojax.models.attention import two_part_attention
from grpojax.models.moe import LAYER, matrices_of, mixture
from grpojax.models.transformer import transformer

RNG = np.random.default_rng(0)
CONFIG = config_with(
  layers=3,
  local_layers=(True, True, False),
  window=3,
  experts=3,
  experts_per_token=2,
)
PROMPTS = prompts_of(RNG, (5, 2))
IDS = jnp.asarray(RNG.integers(0, 11, (2, 2, 6)))


@pytest.mark.slow
def test_forward_mode_agrees_with_reverse_mode():
  """Of layers with and without a window, and experts."""
  lm = transformer(CONFIG)
  params = random_params(lm)
  tangent = jax.tree.map(lambda x: normal(RNG, *x.shape), params)

  def total(params):
    prefix = lm.prefill(params, PROMPTS.prompt_ids, PROMPTS.prompt_mask)
    return jnp.sum(jnp.sin(lm.extend(params, prefix, IDS)[0]))

  @jax.jit
  def both(params, tangent):
    _, along = jax.jvp(total, (params,), (tangent,))
    grad = jax.grad(total)(params)
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), grad, tangent)
    return along, sum(jax.tree.leaves(products))

  np.testing.assert_allclose(*both(params, tangent), rtol=1e-3)


@pytest.mark.slow
def test_a_prompt_out_of_the_window_leaves_no_trace():
  """One layer: a token sees what its window holds, also packed."""
  config = dataclasses.replace(
    CONFIG, layers=1, local_layers=(True,), experts=0, experts_per_token=0
  )
  lm = transformer(config)
  params = random_params(lm)
  prompt = jnp.array([[8, 7, 0, 0, 0]])
  mask = jnp.arange(5)[None] < 2

  @jax.jit
  def run(params, ids, **where):
    prefix = lm.prefill(params, prompt, mask)
    return lm.extend(params, prefix, ids, **where)[0]

  ids = jnp.arange(6).reshape(1, 1, 6)
  other = params | {"embed": params["embed"].at[7].add(1.0)}
  changed = run(other, ids)[0, 0] != run(params, ids)[0, 0]
  np.testing.assert_array_equal(changed.any(-1), [True, True, *[False] * 4])

  positions = jnp.array([[[0, 1, 2, 0, 1, 2]]])
  segments = jnp.array([[[0, 0, 0, 1, 1, 1]]])
  got = run(params, ids, positions=positions, segments=segments)[0, 0]
  parts = run(params, ids.reshape(1, 2, 3))[0]
  np.testing.assert_allclose(got, parts.reshape(6, -1), atol=1e-5)


@pytest.mark.slow
def test_a_query_that_sees_no_prompt_has_a_finite_gradient():
  q = normal(RNG, 1, 1, 1, 1, 2, 4)
  own, prompt = (q[:, :, :, 0], q[:, :, :, 0]), (q[:, 0, :, 0], q[:, 0, :, 0])
  seen = jnp.array([[[[True, True], [False, False]]]])
  attend = functools.partial(
    two_part_attention, row_mask=jnp.eye(2, dtype=bool)
  )
  out = lambda q, prompt: attend(q, own, prompt=prompt, prompt_mask=seen)
  alone = jax.jit(attend)(q, own)
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
  x, layer = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x, layer))
  run = jax.jit(lambda x, layer: mixture(config, x, layer, jnp.tanh)[0])
  np.testing.assert_allclose(run(x, layer).reshape(7, 8), want, atol=1e-4)
  for number in range(3):  # the same one among the matrices of a whole stack
    stack = {
      k: jnp.stack([a if i == number else 9 * a + 1 for i in range(3)])
      for k, a in layer.items()
      if k in matrices_of(layer)
    }
    got = run(x, layer | stack | {LAYER: jnp.int32(number)})
    np.testing.assert_allclose(got.reshape(7, 8), want, atol=1e-4)
