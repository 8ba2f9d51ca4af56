"""Adapters against the user's module, called on unpadded rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from small_models import prompts_of

from grpojax.models import adapters

VOCAB = 11
WIDTH = 8
MAX_LENGTH = 16
LENGTHS = (2, 4, 1)  # of the prompts
GROUP_SIZE = 2
COMPLETION = 5
RNG = np.random.default_rng(0)
PROMPTS = prompts_of(RNG, LENGTHS)
BATCH = PROMPTS.prompt_ids, PROMPTS.prompt_mask
COMPLETIONS = jnp.asarray(RNG.integers(VOCAB, size=(3, GROUP_SIZE, COMPLETION)))


class LinenWithMask(linen.Module):
  """An attention layer with learned positions and a mask of keys."""

  @linen.compact
  def __call__(self, ids, position_ids, real):
    x = linen.Embed(VOCAB, WIDTH)(ids)
    x = x + linen.Embed(MAX_LENGTH, WIDTH)(position_ids)
    mask = linen.make_causal_mask(ids, dtype=bool) & real[:, None, None]
    attend = linen.MultiHeadDotProductAttention(num_heads=2)
    x = x + attend(x, mask=mask)
    return linen.Dense(VOCAB)(x)


class Nnx(nnx.Module):
  """An attention layer with learned positions and dropout."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.positions = nnx.Embed(MAX_LENGTH, WIDTH, rngs=rngs)
    self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

  def __call__(self, ids):
    x = self.embed(ids) + self.positions(jnp.arange(ids.shape[1]))
    x = x + self.dropout(self.attend(x, mask=nnx.make_causal_mask(ids)))
    return self.head(x)


def bare_init(key):
  shapes = {"embed": (VOCAB, WIDTH), "positions": (MAX_LENGTH, WIDTH)}
  shapes["head"] = WIDTH, VOCAB
  keys = jax.random.split(key, 3)
  arrays = map(jax.random.normal, keys, shapes.values())
  return dict(zip(shapes, arrays, strict=True))


def bare_hidden(params, ids, positions, mask):
  x = params["embed"][ids] + params["positions"][positions]
  scores = jnp.einsum("nsd,ntd->nst", x, x)
  causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
  scores = jnp.where(causal & mask[:, None], scores, -1e30)
  return x + jnp.einsum("nst,ntd->nsd", jax.nn.softmax(scores), x)


def whole(function):
  """Returns a function of unpadded ids."""

  def run(ids):
    positions = jnp.arange(ids.shape[1])[None]
    return function(ids, positions, jnp.ones(ids.shape, bool))

  return run


def linen_with_mask_case():
  module = LinenWithMask()
  lm = adapters.from_linen(module, positions="position_ids", mask="real")
  params = jax.jit(lm.init)(jax.random.key(1))
  return lm, params, whole(lambda *x: module.apply({"params": params}, *x))


def nnx_module_case():
  module = Nnx(nnx.Rngs(1))
  lm = adapters.from_nnx(Nnx(nnx.Rngs(1)))
  module.eval()
  return lm, lm.init(jax.random.key(7)), module


def bare_case():
  unembed = lambda params, hidden: hidden @ params["head"]
  lm = adapters.from_apply(bare_hidden, bare_init, unembed)
  params = jax.jit(lm.init)(jax.random.key(1))
  return lm, params, whole(lambda *x: unembed(params, bare_hidden(params, *x)))


def direct(run):
  """Returns logits [B, G, 1 + T, V] from the last prompt token on."""
  groups = []
  for prompt, n, group in zip(BATCH[0], LENGTHS, COMPLETIONS, strict=True):
    prompt = jnp.broadcast_to(prompt[:n], (GROUP_SIZE, n))
    logits = run(jnp.concatenate([prompt, group], axis=1))
    groups.append(logits[:, n - 1 :])
  return jnp.stack(groups)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", [linen_with_mask_case, nnx_module_case, bare_case]
)
def test_training_and_decoding_match_the_module(case):
  lm, params, run = case()
  expected = jax.jit(lambda: direct(run))()
  prefix = jax.jit(lm.prefill)(params, *BATCH)
  traces = []

  @jax.jit
  def extend(*arguments):
    traces.append(arguments)
    return lm.extend(*arguments)

  hidden, cache = extend(params, prefix, COMPLETIONS)
  first = lm.unembed(params, prefix.last_hidden)
  assert cache is None
  assert tuple(prefix.length) == LENGTHS
  for g in range(GROUP_SIZE):
    np.testing.assert_allclose(first, expected[:, g, 0], atol=1e-5)
  logits = lm.unembed(params, hidden)
  np.testing.assert_allclose(logits, expected[:, :, 1:], atol=1e-5)
  cache = lm.init_cache(len(LENGTHS), GROUP_SIZE, COMPLETION)
  for t in range(COMPLETION):
    ids = COMPLETIONS[:, :, t : t + 1]
    at = jnp.full_like(ids, t)
    hidden, cache = extend(params, prefix, ids, cache, at)
    logits = lm.unembed(params, hidden)[:, :, 0]
    np.testing.assert_allclose(logits, expected[:, :, t + 1], atol=1e-5)
  assert len(traces) == 2  # the cache does not change its type


@pytest.mark.slow
def test_positions_reach_the_module_and_packed_rows_are_refused():
  lm, params, _ = bare_case()
  prefix = lm.prefill(params, *BATCH)
  spread = jnp.broadcast_to(2 * jnp.arange(COMPLETION), COMPLETIONS.shape)
  hidden, _ = jax.jit(lm.extend)(params, prefix, COMPLETIONS, None, spread)
  for b, n in enumerate(LENGTHS):
    row = jnp.concatenate([BATCH[0][b, :n], COMPLETIONS[b, 0]])[None]
    positions = jnp.concatenate([jnp.arange(n), n + spread[b, 0]])[None]
    expected = bare_hidden(params, row, positions, jnp.ones_like(row, bool))
    np.testing.assert_allclose(hidden[b, 0], expected[0, n:], atol=1e-5)
  with pytest.raises(ValueError, match="packed completions"):
    lm.extend(params, prefix, COMPLETIONS, segments=jnp.zeros_like(COMPLETIONS))


@pytest.mark.slow
def test_nnx_parameters_are_copies_in_plain_dicts():
  module = Nnx(nnx.Rngs(1))
  lm = adapters.from_nnx(module)
  params = lm.init(jax.random.key(0))
  jax.jit(lm.extend)(params, lm.prefill(params, *BATCH), COMPLETIONS)
  assert params.keys() == {"embed", "positions", "attend", "head"}
  assert params["head"].keys() == {"kernel", "bias"}
  assert isinstance(params["head"]["kernel"], jax.Array)
  assert not module.dropout.deterministic
  jax.tree.map(lambda x: x.delete(), params)  # like a donation
  assert np.isfinite(module(COMPLETIONS[0])).all()


def test_nnx_module_may_write_its_variables():
  class Counting(nnx.Module):
    def __init__(self, rngs):
      self.embed = nnx.Embed(VOCAB, VOCAB, rngs=rngs)
      self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, ids):
      self.calls[...] = self.calls[...] + 1
      return self.embed(ids) + self.calls[...]

  lm = adapters.from_nnx(Counting)
  params = lm.init(jax.random.key(0))
  for _ in range(2):
    logits = jax.jit(lambda params: lm.prefill(params, *BATCH))(params)
    row = params["embed"]["embedding"][BATCH[0][0, LENGTHS[0] - 1]]
    np.testing.assert_allclose(logits.last_hidden[0], row + 1, atol=1e-6)


def test_linen_collections_besides_params_are_refused():
  class Normalised(linen.Module):
    @linen.compact
    def __call__(self, ids):
      x = linen.Embed(VOCAB, WIDTH)(ids)
      return linen.BatchNorm(use_running_average=True)(x)

  with pytest.raises(ValueError, match="batch_stats"):
    adapters.from_linen(Normalised()).init(jax.random.key(0))


@pytest.mark.slow
def test_a_model_that_is_not_causal_is_refused():
  def apply(params, ids, positions, mask):
    seen = params["embed"][ids] * mask[..., None]
    logits = jnp.cumsum(seen, axis=1) @ params["head"]
    total = jnp.sum(seen, axis=(1, 2), keepdims=True)
    return logits + params["leak"] * total * jnp.arange(VOCAB)

  lm = adapters.from_apply(apply, bare_init)
  params = lm.init(jax.random.key(0))
  adapters.check_causal(lm, params | {"leak": 0.0})
  with pytest.raises(ValueError, match="the model is not causal"):
    adapters.check_causal(lm, params | {"leak": 0.02})


def test_a_row_longer_than_the_positions_is_refused():
  lm = adapters.from_nnx(lambda rngs: Nnx(rngs))
  params = lm.init(jax.random.key(0))
  adapters.check_causal(lm, params, length=MAX_LENGTH)
  with pytest.raises(ValueError, match="17 tokens are nan.* fewer positions"):
    adapters.check_causal(lm, params, length=MAX_LENGTH + 1)
