"""Mixtures of experts, their load, and the load-balancing loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import (
  assert_close,
  config_with,
  descend,
  layout_of,
  random_params,
  torch_mixture,
)

from grpojax.core.losses.load_balancing import load_balancing_loss
from grpojax.core.objective import Objective
from grpojax.core.types import Batch, Tokens
from grpojax.core.update import make_update
from grpojax.models import huggingface as hf
from grpojax.models.moe import LAYER, matrices_of, mixture
from grpojax.models.transformer import transformer

RNG = np.random.default_rng(0)
B = 4
G = 4
P = 3
T = 8
V = 11
CONFIG = config_with(layers=1, experts=5, experts_per_token=2)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_mixture_is_the_weighted_sum_of_its_experts(normalize):
  """Each expert has its own adapters."""
  config = config_with(
    experts=3, experts_per_token=2, normalize_experts=normalize
  )
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
    a = RNG.normal(size=(3, fan_in, 2))
    b = RNG.normal(size=(3, 2, fan_out))
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
  for number in range(3):  # the layer as part of a whole stack
    stack = {
      k: jnp.stack([a if i == number else 9 * a + 1 for i in range(3)])
      for k, a in layer.items()
      if k in matrices_of(layer)
    }
    got = run(x, layer | stack | {LAYER: jnp.int32(number)})
    np.testing.assert_allclose(got.reshape(7, 8), want, atol=1e-4)


@pytest.mark.slow
def test_load_balancing_agrees_with_transformers(tmp_path):
  """The prompt ends with padding, which has no weight."""
  torch = pytest.importorskip("torch")
  model = torch_mixture(tmp_path, layers=2)
  ids = RNG.integers(0, V, (1, P + T))
  without_padding = torch.tensor(np.delete(ids, P - 1, axis=1))
  theirs = model(without_padding, output_router_logits=True).aux_loss
  theirs.backward()
  lm, params = hf.load(tmp_path)
  prompt = jnp.asarray(ids[:, :P])
  completion = jnp.asarray(ids[:, None, P:])
  mask = jnp.arange(P)[None] < P - 1

  def ours(params):
    tokens = Tokens(
      *(prompt, mask, completion),
      load_weights=jnp.ones((1, 1, T)),
      prompt_load_weights=mask * 1.0,
    )
    *_, load = lm.forward(params, tokens)
    return load_balancing_loss(load)

  value, gradient = jax.jit(jax.value_and_grad(ours))(params)
  np.testing.assert_allclose(value, float(theirs.detach()), rtol=1e-5)
  for i, layer in enumerate(model.model.layers):
    want = layer.mlp.gate.weight.grad.T
    got = gradient["layers"]["router"][i]
    assert np.abs(got).max() > 1e-3
    np.testing.assert_allclose(got, want, atol=1e-5)


def draw():
  """Returns a model and a batch with an empty sample and an empty group."""
  lm = transformer(CONFIG)
  lengths = RNG.integers(1, T // 2, (B, G))
  lengths[0, 0] = T
  lengths[1, 1] = 0
  lengths[3] = 0
  batch = Batch(
    prompt_ids=jnp.asarray(RNG.integers(0, V, (B, P))),
    prompt_mask=jnp.arange(P) < jnp.array([[3], [1], [2], [3]]),
    completion_ids=jnp.asarray(RNG.integers(0, V, (B, G, T))),
    completion_mask=jnp.arange(T) < lengths[..., None],
    advantages=jnp.zeros((B, G)),  # no policy gradient
  )
  return lm, random_params(lm), batch, lengths


def by_rows(lm, params, batch, lengths):
  """Returns the loss of rows with a copy of the prompt each."""
  learned = lengths.reshape(-1) > 0
  rows = lambda x: jnp.repeat(x, G, axis=0)[learned]
  prompts = rows(batch.prompt_ids)
  prompt_mask = rows(batch.prompt_mask)
  ids = batch.completion_ids.reshape(B * G, 1, T)[learned]
  mask = batch.completion_mask.reshape(B * G, 1, T)[learned]
  tokens = Tokens(
    *(prompts, prompt_mask, ids),
    load_weights=mask * 1.0,
    prompt_load_weights=prompt_mask * 1.0,
  )
  *_, load = lm.forward(params, tokens)
  return load_balancing_loss(load)


@pytest.mark.slow
@pytest.mark.parametrize(
  "parts, packed, more",
  [
    (8, False, {}),  # more parts than prompts
    pytest.param(
      *(4, True, {"top_entropy_quantile": 0.5}), marks=pytest.mark.long
    ),
  ],
)
def test_packing_and_micro_batches_do_not_change_the_loss(parts, packed, more):
  """Compares with rows of a prompt and a completion each."""
  lm, params, batch, lengths = draw()
  loss = lambda params: by_rows(lm, params, batch, lengths)
  value, gradient = jax.jit(jax.value_and_grad(loss))(params)
  objective = Objective(router_aux_coef=0.5, **more)
  layout = layout_of(lengths, T, [3, 1, 2, 3], P, 1, parts) if packed else None
  run = lambda batch: descend(
    lm, params, batch.replace(packing=layout), objective, micro_batches=parts
  )
  moved, metrics = run(batch)
  np.testing.assert_allclose(metrics["router_aux_loss"], value, rtol=1e-5)
  np.testing.assert_allclose(metrics["loss"], 0.5 * value, rtol=1e-5)
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
  expected = jax.tree.map(lambda x: 0.5 * x, gradient)
  assert_close(moved, expected, rtol=0, atol=1e-5 * scale)
  nothing = jnp.zeros_like(batch.completion_mask)
  moved, metrics = run(batch.replace(completion_mask=nothing))
  assert float(metrics["router_aux_loss"]) == 0
  assert all((x == 0).all() for x in jax.tree.leaves(moved))


def test_router_aux_coef_requires_experts():
  lm = transformer(CONFIG)._replace(has_experts=False)
  make_update(lm, optax.sgd(1.0))
  with pytest.raises(ValueError, match=r"router_aux_coef=0.1 .* has none"):
    make_update(lm, optax.sgd(1.0), Objective(router_aux_coef=0.1))
