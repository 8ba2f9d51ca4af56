import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import Reference, logprobs_and_load, token_logprobs
from grpojax.core.types import LM, Prefix

RNG = np.random.default_rng(0)
B, G, P, T, V = 2, 3, 5, 7, 11
PROMPTS = jnp.asarray(RNG.integers(0, V, (B, P)))
PROMPT_MASK = jnp.arange(P) < jnp.array([[5], [3]])
IDS = jnp.asarray(RNG.integers(0, V, (B, G, T)))


@pytest.mark.slow
@pytest.mark.parametrize(
  "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=2)]
)
def test_closed_form_on_a_markov_chain(tabular, sampling):
  lm = tabular.lm(V, V)
  table = lm.init(jax.random.key(0))
  logprobs, entropy = token_logprobs(
    lm, table, PROMPTS, PROMPT_MASK, IDS, sampling=sampling, chunk_size=3
  )
  assert logprobs.dtype == entropy.dtype == jnp.float32
  rows = tabular.rows(PROMPTS[:, 0], IDS)
  logits = np.asarray(table, np.float64)[rows] / sampling.temperature
  if sampling.top_k:  # The scored token always stays.
    out = logits < np.sort(logits, -1)[..., -2:-1]
    np.put_along_axis(out, np.asarray(IDS)[..., None], False, -1)
    logits = np.where(out, -np.inf, logits)
  log_p = tabular.log_table(logits)
  expected = np.take_along_axis(log_p, np.asarray(IDS)[..., None], -1)[..., 0]
  np.testing.assert_allclose(logprobs, expected, atol=1e-5)
  p = np.exp(log_p)
  surprise = np.where(p > 0, -p * np.where(p > 0, log_p, 0), 0)
  np.testing.assert_allclose(entropy, surprise.sum(-1), atol=1e-5)
  tokens = PROMPTS, PROMPT_MASK, IDS
  total = lambda params: token_logprobs(lm, params, *tokens)[1].sum()
  np.testing.assert_array_equal(jax.grad(total)(table), 0)  # no gradient


def with_gradient(lm, params, ids, **options):
  """Returns a weighted sum of log-probabilities and terms, with gradient."""

  def objective(params):
    actual = logprobs_and_load(lm, params, PROMPTS, PROMPT_MASK, ids, **options)
    total = jnp.sum(jnp.sin(jnp.arange(ids.size)) * actual.logprobs.ravel())
    if options.get("entropy_gradient"):
      total += actual.entropy.sum()
    if options.get("reference"):
      total += actual.kl.sum()
    return total, (actual.logprobs, actual.entropy)

  return jax.value_and_grad(objective, has_aux=True)(params)


@pytest.mark.parametrize("term", ["", "entropy_gradient", "reference"])
def test_memory_at_a_vocabulary_of_152_thousand(term):
  """At most four arrays of a chunk's logits, or five with the entropy."""
  chunk, vocab = 512, 151_936
  lm = LM(
    init=None,
    prefill=lambda params, ids, mask: Prefix(params[ids[:, 0]], ids, None),
    extend=lambda params, prefix, ids, **_: (params[ids], None),
    unembed=lambda params, hidden: hidden @ params.T,
    init_cache=None,
  )
  params = jax.ShapeDtypeStruct((vocab, 16), jnp.float32)
  ids = jax.ShapeDtypeStruct((B, 1, 4096), jnp.int32)
  hidden = jax.ShapeDtypeStruct((*ids.shape, 16), jnp.float32)

  @jax.jit
  def function(params, ids, *reference):
    options = {term: True} if term else {}
    if term == "reference":
      options[term] = Reference(lm, *reference)
    return with_gradient(lm, params, ids, chunk_size=chunk, **options)

  compiled = function.lower(params, ids, params, hidden).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < (4 + (term == "entropy_gradient")) * chunk * vocab * 4


@pytest.mark.slow
def test_gradients_of_chunks_are_added_in_float32():
  """A bfloat16 head, and 512 chunks of a token."""
  tokens, vocab = 512, 4
  lm = LM(
    init=None,
    prefill=lambda params, ids, mask: Prefix(jnp.ones((1, 1)), ids, None),
    extend=lambda params, prefix, ids, **_: (jnp.ones((*ids.shape, 1)), None),
    unembed=lambda params, hidden: hidden @ params,
    init_cache=None,
  )
  ids = jnp.zeros((1, 1, tokens), int)
  batch = ids[0, :, :1], jnp.ones((1, 1), bool), ids

  def total(params):
    return token_logprobs(lm, params, *batch, chunk_size=1)[0].sum()

  gradient = jax.grad(total)(jnp.zeros((1, vocab), jnp.bfloat16))
  np.testing.assert_array_equal(gradient[0], tokens * (np.eye(4)[0] - 0.25))
