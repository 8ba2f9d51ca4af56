"""Gram matrices of scores, against the Jacobian of all log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.logprobs import token_logprobs
from grpojax.core.sampling import Sampling
from grpojax.core.types import Prompts
from grpojax.studies import gram

PROMPT = np.array([[3, 7, 1, 0, 0]])
IDS = np.array(
  [
    [5, 2, 9, 1],
    [4, 1, 0, 0],
    [5, 2, 9, 1],
    [4, 1, 8, 3],  # the same completion as the second, other padding
    [4, 1, 8, 3],  # not the same: it goes on
    [6, 6, 6, 2],
  ]
)
LENGTHS = np.array([4, 2, 4, 2, 4, 3])


@pytest.fixture(scope="module")
def case(tiny):
  mask = np.arange(IDS.shape[1]) < LENGTHS[:, None]
  return tiny, Prompts(PROMPT, np.arange(5)[None] < 3), mask


@pytest.mark.slow  # many gradients
def test_gram_matrix(case):
  tiny, prompts, mask = case
  sampling = Sampling(temperature=1.7)

  def logprobs(params):
    found, _ = token_logprobs(
      tiny.lm,
      params,
      jnp.asarray(prompts.prompt_ids),
      jnp.asarray(prompts.prompt_mask),
      jnp.asarray(IDS)[None],
      sampling=sampling,
    )
    return jnp.sum(found[0] * mask, -1)

  jacobian = jax.tree.leaves(jax.jit(jax.jacobian(logprobs))(tiny.params))
  scores = np.concatenate([x.reshape(len(IDS), -1) for x in jacobian], 1)
  scores = scores.astype(np.float64)
  found, distinct = gram.score_gram(
    gram.make_score(tiny.lm, sampling),
    tiny.params,
    prompts,
    IDS,
    mask,
    chunk_size=3,
  )
  assert distinct == 4 and found.dtype == np.float64
  expected = scores @ scores.T
  np.testing.assert_allclose(
    found, expected, rtol=1e-4, atol=1e-5 * expected.max()
  )
  assert found[0, 0] == found[0, 2] and found[1, 5] == found[3, 5]


def test_runs_of_columns_add_up(monkeypatch):
  scores = np.random.default_rng(0).normal(size=(5, 23)).astype(np.float32)
  monkeypatch.setattr(gram, "_COLUMNS", 7)
  exact = scores.astype(np.float64)
  np.testing.assert_allclose(gram._gram(scores), exact @ exact.T, rtol=1e-5)
