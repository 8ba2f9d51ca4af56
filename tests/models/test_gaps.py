"""Ids without a token: padding rows of a vocabulary, and gaps in it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_close, config_with, sample

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import (
  Reference,
  logprobs_and_load,
  token_logprobs,
)
from grpojax.core.types import Prompts, Tokens
from grpojax.models import lora
from grpojax.models.transformer import transformer

V = 24
GAPS = ((5, 7), (20, V))
REAL = [i for i in range(V) if not 5 <= i < 7 and i < 20]
CONFIG = config_with(vocab_size=V, layers=1, mlp=8, tied=False, logits_cap=30.0)
PLAIN, MASKED = (
  transformer(dataclasses.replace(CONFIG, gaps=gaps)) for gaps in ((), GAPS)
)
PROMPTS = Prompts(
  jnp.array([[3, 8, 1], [2, 9, 0]]), jnp.array([[1, 1, 1], [1, 1, 0]], bool)
)


def params_of(seed=0):
  """Parameters of a model that prefers ids without a token."""
  params = PLAIN.init(jax.random.key(seed))
  params = jax.tree.map(lambda x: 9 * x, params)
  head = params["head"].at[:, jnp.array(REAL)].multiply(0.2)
  return params | {"head": head}


@pytest.mark.parametrize(
  "sampling, adapted",
  [
    (Sampling(0.5), True),
    (Sampling(0.0), False),
    (Sampling(top_k=V - 2, min_p=0.01), False),
    (Sampling(weights_dtype="int8", cache_dtype="int8"), False),
  ],
)
def test_samples_and_loss_use_only_real_ids(sampling, adapted):
  whole = params_of()
  params = whole
  lm = MASKED
  if adapted:
    params = lora.init(whole, jax.random.key(1), 2, "layers/(q|v)")
    lm = lora.adapt(MASKED, whole, 1.0)
  options = dict(group_size=64, max_new_tokens=3, eos_ids=(4,))
  draw = lambda lm, params: sample(
    lm, params, PROMPTS, 2, sampling=sampling, **options
  )
  ids = draw(PLAIN, whole).completion_ids
  assert np.mean(np.isin(ids, REAL)) < 0.5  # the test needs gaps to matter
  samples = draw(lm, params)
  ids = samples.completion_ids
  mask = np.asarray(samples.completion_mask)
  assert np.isin(np.asarray(ids)[mask], REAL).all()
  rows = PROMPTS.prompt_ids, PROMPTS.prompt_mask, ids
  loss, _ = token_logprobs(lm, params, *rows, sampling=sampling, chunk_size=3)
  if not sampling.formats:
    np.testing.assert_allclose(samples.logprobs[mask], loss[mask], atol=1e-5)


def test_values_and_gradients_equal_those_of_a_model_without_gaps():
  ids = jax.random.choice(jax.random.key(3), jnp.array(REAL), (2, 2, 4))
  places = jnp.searchsorted(jnp.array(REAL), ids)
  real = jnp.array(REAL)
  # A model of the real ids, numbered consecutively.
  cut = PLAIN._replace(
    extend=lambda params, prefix, ids, **options: PLAIN.extend(
      params, prefix, real[ids], **options
    ),
    unembed=lambda *args: PLAIN.unembed(*args)[..., real],
    forward=None,
    prepare=None,
  )

  def values(lm, ids):
    def loss(params, other):
      rows = Tokens(PROMPTS.prompt_ids, PROMPTS.prompt_mask, ids)
      read = functools.partial(logprobs_and_load, lm, entropy_gradient=True)
      reference = Reference(lm, other, read(other, rows).hidden)
      scores = read(params, rows, reference=reference)
      values = scores.logprobs, scores.entropy, scores.kl
      return sum(jnp.sum(jnp.sin(x)) for x in values), values

    return jax.grad(loss, has_aux=True)(params_of(), params_of(7))

  got = values(MASKED, ids)
  assert_close(got, values(cut, places), atol=2e-5, rtol=1e-4)
  assert not np.any(np.delete(got[0]["head"], REAL, axis=1))
