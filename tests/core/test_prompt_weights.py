"""Importance weights of prompts in the update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from grpojax.core.batch import make_batch
from grpojax.core.objective import Objective
from grpojax.core.packing import layout as packing_layout
from grpojax.core.step import init_state
from grpojax.core.types import Rollout
from grpojax.core.update import UpdateOptions, make_update

B, G, T, P = 4, 2, 3, 1
KEY = jax.random.key(3)
REWARDS = jax.random.normal(KEY, (B, G))


def gradients(tabular, pack=False, beta=0.0, **options):
  """Returns the function from prompt weights to a step of SGD."""
  lm = tabular.lm(2, 4)
  params = lm.init(KEY)
  ids = jax.random.randint(KEY, (B, G, T), 0, 4)
  lengths = np.array([[3, 1], [2, 2], [1, 1], [3, 2]])
  mask = jnp.asarray(np.arange(T) < lengths[..., None])
  prompts = jnp.arange(B)[:, None] % 2, jnp.ones((B, P), bool)
  done, logprobs = jnp.ones((B, G), bool), jnp.full((B, G, T), -1.4)
  rollout = Rollout(*prompts, ids, mask, logprobs, done)
  options, packing = UpdateOptions(**options), None
  if pack:
    parts = options.micro_batches
    packing = packing_layout.plan(lengths, T, np.ones(B, int), P, 1, parts)
  tx = optax.sgd(1.0)
  objective = Objective(weighting="fixed_length", beta=beta)
  update = make_update(lm, tx, objective, options)

  @jax.jit
  def moved(weights):
    batch = make_batch(
      *(lm, rollout, REWARDS, objective),
      options=options,
      ref_params=params + 0.5 * params**2 if beta else None,
      prompt_weights=weights,
      packing=packing,
    )
    return params - update(init_state(params, tx, KEY), batch)[0].params

  return lambda weights: np.asarray(
    moved(None if weights is None else jnp.asarray(weights, "f4"))
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "options", [{}, {"micro_batches": 2, "pack": True}, {"beta": 0.3}], ids=str
)
def test_the_gradient_is_linear_in_the_weights(options, tabular):
  weights = np.array([0.5, 3.0, 0.0, 1.25])
  gradient = gradients(tabular, **options)
  each = [gradient(np.eye(B)[i]) for i in range(B)]
  result = gradient(weights)
  expected = sum(w * x for w, x in zip(weights, each, strict=True))
  assert_allclose(result, expected, atol=1e-6)
  assert np.abs(result).max() > 0.01
  plain = gradient(None)
  assert_allclose(plain, sum(each), atol=1e-6)
  assert np.abs(plain - result).max() > 0.01


def test_minibatches_take_the_weights_of_their_prompts(tabular):
  """The first minibatch, of every second prompt, has weight 0."""
  gradient = gradients(tabular, minibatches=2)
  half, last = (gradient([0.0, w, 0.0, w]) for w in (1.0, 2.0))
  assert_allclose(last, 2 * half, rtol=1e-4, atol=1e-6)
  assert np.abs(half).max() > 0.01
