"""Log-probabilities of tokens, and samples of their distribution."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.decoding.sampling import Sampling, sample, transform_logits
from grpojax.core.logprobs import Reference, logprobs_and_load, token_logprobs
from grpojax.core.types import LM, Prefix, Tokens

RNG = np.random.default_rng(0)
B = 2
G = 3
P = 5
T = 7
V = 11
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
    tokens = Tokens(PROMPTS, PROMPT_MASK, ids)
    actual = logprobs_and_load(lm, params, tokens, **options)
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
  chunk = 512
  vocab = 151_936
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
  tokens = 512
  vocab = 4
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


def test_a_16_bit_head_is_cast_once():
  """The only cast to 16 bits is that of the gradient, after the chunks."""
  head = jax.ShapeDtypeStruct((5, V), jnp.bfloat16)
  lm = LM(
    init=None,
    prefill=lambda params, ids, mask: Prefix(jnp.ones((1, 5)), ids, None),
    extend=lambda params, prefix, ids, **_: (jnp.ones((*ids.shape, 5)), None),
    unembed=lambda params, hidden: hidden.astype(params.dtype) @ params,
    init_cache=None,
  )
  batch = PROMPTS[:1], PROMPT_MASK[:1], IDS[:1, :1]

  def total(params):
    return token_logprobs(lm, params, *batch, chunk_size=3)[0].sum()

  text = str(jax.make_jaxpr(jax.grad(total))(head))
  casts = re.findall(r":(\w+)\[5,11\] = convert_element_type", text)
  assert casts.count("bf16") == 1, text


# Sampling.

LOGITS = jnp.asarray(2 * np.random.default_rng(0).normal(size=(16, 11)))
SETTINGS = [
  Sampling(),
  Sampling(temperature=0.6),
  Sampling(top_k=4),
  Sampling(top_k=40),
  Sampling(top_p=0.85),
  Sampling(min_p=0.15),
  Sampling(temperature=1.3, top_k=7, top_p=0.9, min_p=0.1),
]


def softmax(x):
  x = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_distribution_equals_transformers(sampling):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  theirs = torch.tensor(np.asarray(LOGITS))
  warpers = [transformers.TemperatureLogitsWarper(sampling.temperature)]
  if sampling.top_k:
    warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
  if sampling.top_p < 1:
    warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
  if sampling.min_p:
    warpers.append(transformers.MinPLogitsWarper(sampling.min_p))
  for warper in warpers:
    theirs = warper(None, theirs)
  ours = softmax(transform_logits(LOGITS, sampling))
  expected = torch.softmax(theirs, -1).numpy()
  np.testing.assert_array_equal(ours > 0, expected > 0)
  np.testing.assert_allclose(ours, expected, atol=1e-6)


def hard_rows():
  """Returns rows of logits that are hard for the search of a threshold."""
  rng = np.random.default_rng(1)
  normal = rng.normal(size=64)
  rows = {
    "random": 3 * normal,
    "peaked": 40 * normal,
    "bfloat16": np.asarray(jnp.asarray(2 * normal, jnp.bfloat16), np.float64),
    "few values": rng.integers(-2, 3, size=64),
    "zeros of both signs": np.where(normal > 1, normal, np.copysign(0, normal)),
    "an outlier": np.where(np.arange(64) == 9, 0.0, -1e4),
    "adjacent floats": 1 + rng.integers(4, size=64) * 2.0**-23,
    "tiny": 1e-37 * (normal + np.sign(normal)),  # Less counts as 0.
    "huge": 3e38 * np.tanh(normal),
    "masked": np.where(normal > 0.5, normal, -np.inf),
    "all but one masked": np.where(np.arange(64) == 40, -3.0, -np.inf),
    "around an exponent": 2.0 ** rng.integers(-3, 4, size=64),
  }
  rows["negative"] = -100 - rows["random"]
  return {name: np.float32(row) for name, row in rows.items()}


HARD = hard_rows()


def kept_by_sorting(row, k, p):
  """Returns the mask of top-k, then top-p, in float64, with ties."""
  if 0 < k < len(row):
    row = np.where(row >= np.sort(row)[-k], row, -np.inf)
  with np.errstate(over="ignore"):
    weights = np.exp(np.float64(row) - np.float64(row.max()))
  order = np.argsort(-row, kind="stable")
  before = np.cumsum(weights[order]) - weights[order]
  in_time = before < p * weights.sum() if p < 1 else row[order] > -np.inf
  return (row >= row[order][in_time].min()) & (row > -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 17, 63])
@pytest.mark.parametrize("p", [0.3, 1 - 2**-24, 1.0])
def test_thresholds_keep_the_same_tokens_as_sorting(k, p):
  logits = jnp.asarray(np.stack(list(HARD.values())))
  got = transform_logits(logits, Sampling(top_k=k, top_p=p))
  real = np.asarray(got) > -1e30
  np.testing.assert_array_equal(got, np.where(real, logits, got))
  for name, row, ours in zip(HARD, np.asarray(logits), real, strict=True):
    # Both sums are rounded, so a token near p may fall on either side.
    least = kept_by_sorting(row, k, p * (1 - 1e-6))
    most = kept_by_sorting(row, k, p if p == 1 else min(p * (1 + 1e-6), 1))
    assert np.all(least <= ours) and np.all(ours <= most), name


draw = jax.jit(sample, static_argnums=2)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_samples_have_the_distribution_of_their_logprobs(sampling):
  """By the chi-square distance of 20,000 draws."""
  n = 20_000
  logits = LOGITS[3] / 2
  keys = jax.random.split(jax.random.key(1), n)
  ids, logprobs = draw(keys, jnp.broadcast_to(logits, (n, 11)), sampling)
  drawn, first, counts = np.unique(ids, return_index=True, return_counts=True)
  probs = np.exp(np.asarray(logprobs, np.float64)[first])
  np.testing.assert_allclose(
    np.exp(logprobs), probs[drawn.searchsorted(ids)], rtol=1e-5
  )
  np.testing.assert_allclose(
    probs.sum(), 1, atol=1e-5
  )  # Every token was drawn.
  chi_square = ((counts - n * probs) ** 2 / (n * probs)).sum()
  freedom = len(drawn) - 1
  assert freedom >= 2
  # Mean k, variance 2 k: five standard deviations.
  assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("uniform, drawn", [(0.0, 1), (1 - 2.0**-23, 5)])
@pytest.mark.parametrize("copies", [1, 8])
def test_extreme_random_numbers_draw_likely_tokens(
  monkeypatch, uniform, drawn, copies
):
  """Once in 2^23 draws the number is 0, which must not select a rare token."""
  drawer = lambda _, shape: jnp.full(shape, uniform)
  monkeypatch.setattr(jax.random, "uniform", drawer)
  # With copies, the first and the last block are equal.
  row = jnp.array([-60.0, 0.3, -1e30, -60.0, 1.0, 0.2, -60.0, -1e30])
  ids, logprobs = sample(jax.random.key(0), jnp.tile(row, copies))
  assert ids % 8 == drawn and logprobs > -10


def test_nan_logits_give_nan_logprobs():
  logits = LOGITS.at[3, 4].set(jnp.nan)
  keys = jax.random.split(jax.random.key(0), 16)
  _, logprobs = draw(keys, logits, SETTINGS[-1])
  np.testing.assert_array_equal(jnp.isnan(logprobs), np.arange(16) == 3)
