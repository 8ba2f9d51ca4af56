import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core.decoding.sampling import Sampling, sample, transform_logits

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
def test_distribution_is_that_of_transformers(sampling):
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
  assert_array_equal(ours > 0, expected > 0)
  assert_allclose(ours, expected, atol=1e-6)


HAND = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))


@pytest.mark.parametrize(
  "keep, expected",
  [
    (1, [0.625, 0.375, 0, 0]),
    (2, np.array([0.5, 0.3, 0.15, 0]) / 0.95),
    (3, np.array([0.5, 0.3, 0, 0.05]) / 0.85),
  ],
)
def test_an_id_can_be_kept_in_the_support(keep, expected):
  got = transform_logits(HAND, Sampling(top_k=2), keep=jnp.array(keep))
  got = softmax(got)
  assert_allclose(got, expected, atol=1e-6)


def hard_rows():
  """Rows of logits, where a search for a threshold could go wrong."""
  rng = np.random.default_rng(1)
  normal = rng.normal(size=64)
  rows = {
    "random": 3 * normal,
    "peaked": 40 * normal,
    "bfloat16": np.asarray(jnp.asarray(2 * normal, jnp.bfloat16), np.float64),
    "few values": rng.integers(-2, 3, size=64),
    "all equal": np.full(64, -1.7),
    "zeros of both signs": np.where(normal > 0, 0.0, -0.0),
    "zeros among others": np.where(normal > 1, normal, np.copysign(0, normal)),
    "one apart": np.where(np.arange(64) == 9, 0.0, -1e4),
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
  """What top-k, then top-p keep of one row: sorted, in float64, with ties."""
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
def test_kept_are_those_that_sorting_keeps(k, p):
  logits = jnp.asarray(np.stack(list(HARD.values())))
  got = transform_logits(logits, Sampling(top_k=k, top_p=p))
  real = np.asarray(got) > -1e30
  assert_array_equal(got, np.where(real, logits, got))
  for name, row, ours in zip(HARD, np.asarray(logits), real, strict=True):
    # Both sums are rounded: a token that far from p may fall on either side.
    least = kept_by_sorting(row, k, p * (1 - 1e-6))
    most = kept_by_sorting(row, k, p if p == 1 else min(p * (1 + 1e-6), 1))
    assert np.all(least <= ours) and np.all(ours <= most), name


draw = jax.jit(sample, static_argnums=2)


def test_greedy_takes_the_best_with_certainty():
  keys = jax.random.split(jax.random.key(0), 16)
  ids, logprobs = draw(keys, LOGITS, Sampling(temperature=0.0))
  assert ids.dtype == jnp.int32
  assert_array_equal(ids, LOGITS.argmax(-1))
  assert_array_equal(logprobs, 0.0)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_logprob_is_of_the_distribution_drawn_from(sampling):
  """The chi-square distance of 20,000 draws from exp(logprob)."""
  n, logits = 20_000, LOGITS[3] / 2
  keys = jax.random.split(jax.random.key(1), n)
  ids, logprobs = draw(keys, jnp.broadcast_to(logits, (n, 11)), sampling)
  drawn, first, counts = np.unique(ids, return_index=True, return_counts=True)
  probs = np.exp(np.asarray(logprobs, np.float64)[first])
  assert_allclose(np.exp(logprobs), probs[drawn.searchsorted(ids)], rtol=1e-5)
  assert_allclose(probs.sum(), 1, atol=1e-5)  # It was all drawn.
  chi_square = ((counts - n * probs) ** 2 / (n * probs)).sum()
  freedom = len(drawn) - 1
  assert freedom >= 2
  # Mean k, variance 2 k: five standard deviations.
  assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("uniform, drawn", [(0.0, 1), (1 - 2.0**-23, 5)])
@pytest.mark.parametrize("copies", [1, 8])
def test_the_ends_of_the_unit_interval(monkeypatch, uniform, drawn, copies):
  """Once in 2^23 draws a number is 0: that is no token of 1e-26, or of none."""
  drawer = lambda _, shape: jnp.full(shape, uniform)
  monkeypatch.setattr(jax.random, "uniform", drawer)
  # The first and the last block alike, where there are several.
  row = jnp.array([-60.0, 0.3, -1e30, -60.0, 1.0, 0.2, -60.0, -1e30])
  ids, logprobs = sample(jax.random.key(0), jnp.tile(row, copies))
  assert ids % 8 == drawn and logprobs > -10


@pytest.mark.parametrize("sampling", [SETTINGS[-1], Sampling(temperature=0.0)])
def test_half_precision(sampling):
  half = LOGITS.astype(jnp.bfloat16)
  out = transform_logits(half, sampling)
  assert out.dtype == jnp.float32
  expected = transform_logits(half.astype(jnp.float32), sampling)
  assert_array_equal(out, expected)


def test_logits_that_are_nan_are_not_hidden():
  logits = LOGITS.at[3, 4].set(jnp.nan)
  keys = jax.random.split(jax.random.key(0), 16)
  _, logprobs = draw(keys, logits, SETTINGS[-1])
  assert_array_equal(jnp.isnan(logprobs), np.arange(16) == 3)
