"""Adapters against the user's own module, run directly on unpadded rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from grpojax.models import adapters

VOCAB, WIDTH, MAX_LENGTH = 11, 8, 16
LENGTHS = (2, 4, 1)  # Real tokens of each prompt, among P = 4.
GROUP_SIZE, COMPLETION = 2, 5


class LinenWithMask(linen.Module):
  """One attention layer with learned positions and a mask of its keys."""

  @linen.compact
  def __call__(self, ids, position_ids, real):
    x = linen.Embed(VOCAB, WIDTH)(ids)
    x = x + linen.Embed(MAX_LENGTH, WIDTH)(position_ids)
    mask = linen.make_causal_mask(ids, dtype=bool) & real[:, None, None]
    attend = linen.MultiHeadDotProductAttention(num_heads=2)
    x = x + attend(x, mask=mask)
    return linen.Dense(VOCAB)(x)


class Nnx(nnx.Module):
  """One attention layer with learned positions and heavy dropout."""

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
  keys = jax.random.split(key, 3)
  return {
    "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
    "positions": jax.random.normal(keys[1], (MAX_LENGTH, WIDTH)),
    "head": jax.random.normal(keys[2], (WIDTH, VOCAB)),
  }


def bare_hidden(params, ids, positions, mask):
  x = params["embed"][ids] + params["positions"][positions]
  scores = jnp.einsum("nsd,ntd->nst", x, x)
  causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
  scores = jnp.where(causal & mask[:, None], scores, -1e30)
  return x + jnp.einsum("nst,ntd->nsd", jax.nn.softmax(scores), x)


def bare_logits(params, ids, positions, mask):
  return bare_hidden(params, ids, positions, mask) @ params["head"]


def linen_with_mask_case():
  module = LinenWithMask()
  lm = adapters.from_linen(module, positions="position_ids", mask="real")
  params = jax.jit(lm.init)(jax.random.key(1))

  def run(ids):
    positions = jnp.arange(ids.shape[1])[None]
    variables = {"params": params}
    return module.apply(variables, ids, positions, jnp.ones(ids.shape, bool))

  return lm, params, run


def nnx_module_case():
  module, lm = Nnx(nnx.Rngs(1)), adapters.from_nnx(Nnx(nnx.Rngs(1)))
  module.eval()
  return lm, lm.init(jax.random.key(7)), module


def run_bare(params, ids):
  positions = jnp.arange(ids.shape[1])[None]
  return bare_logits(params, ids, positions, jnp.ones(ids.shape, bool))


def bare_case(lm=None):
  lm = lm or adapters.from_apply(bare_logits, bare_init)
  params = jax.jit(lm.init)(jax.random.key(1))
  return lm, params, functools.partial(run_bare, params)


def bare_hidden_case():
  unembed = lambda params, hidden: hidden @ params["head"]
  return bare_case(adapters.from_apply(bare_hidden, bare_init, unembed))


CASES = (
  linen_with_mask_case,
  nnx_module_case,
  pytest.param(bare_hidden_case, marks=pytest.mark.slow),
)


def ids_and_mask():
  rng = np.random.default_rng(0)
  mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
  prompts = rng.integers(VOCAB, size=mask.shape, dtype=np.int32)
  shape = (len(LENGTHS), GROUP_SIZE, COMPLETION)
  completions = rng.integers(VOCAB, size=shape, dtype=np.int32)
  return jnp.asarray(prompts), jnp.asarray(mask), jnp.asarray(completions)


def direct(run):
  """Logits [B, G, 1 + T, V] from the last prompt token on, unpadded."""
  prompts, _, completions = ids_and_mask()
  groups = []
  for prompt, length, completion in zip(
    prompts, LENGTHS, completions, strict=True
  ):
    prompt = jnp.broadcast_to(prompt[:length], (GROUP_SIZE, length))
    logits = run(jnp.concatenate([prompt, completion], axis=1))
    groups.append(logits[:, length - 1 :])
  return jnp.stack(groups)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_completions_match_the_module_whole_and_decoded(case):
  lm, params, run = case()
  expected = jax.jit(lambda: direct(run))()
  prompts, mask, completions = ids_and_mask()
  prefix = jax.jit(lm.prefill)(params, prompts, mask)
  traces = []

  @jax.jit
  def extend(*arguments):
    traces.append(arguments)
    return lm.extend(*arguments)

  hidden, cache = extend(params, prefix, completions)
  first = lm.unembed(params, prefix.last_hidden)
  assert cache is None
  assert tuple(prefix.length) == LENGTHS
  for g in range(GROUP_SIZE):
    np.testing.assert_allclose(first, expected[:, g, 0], atol=1e-5)
  np.testing.assert_allclose(
    lm.unembed(params, hidden), expected[:, :, 1:], atol=1e-5
  )
  cache = lm.init_cache(len(LENGTHS), GROUP_SIZE, COMPLETION)
  for t in range(COMPLETION):
    hidden, cache = extend(params, prefix, completions[:, :, t : t + 1], cache)
    logits = lm.unembed(params, hidden)[:, :, 0]
    np.testing.assert_allclose(logits, expected[:, :, t + 1], atol=1e-5)
  assert len(traces) == 2  # The cache keeps its shapes and dtypes.


@pytest.mark.slow
def test_gradient_matches_the_module():
  lm, params, _ = bare_case()
  prompts, mask, completions = ids_and_mask()

  def ours(params):
    prefix = lm.prefill(params, prompts, mask)
    hidden, _ = lm.extend(params, prefix, completions)
    first = GROUP_SIZE * jnp.sin(prefix.last_hidden).sum()
    return first + jnp.sin(hidden).sum()

  def theirs(params):
    return jnp.sin(direct(lambda ids: run_bare(params, ids))).sum()

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    jax.jit(jax.grad(ours))(params),
    jax.jit(jax.grad(theirs))(params),
  )


@pytest.mark.slow
def test_given_positions_reach_the_module():
  lm, params, _ = bare_case()
  prompts, mask, completions = ids_and_mask()
  prefix = lm.prefill(params, prompts, mask)
  extend = jax.jit(lm.extend)
  spread = jnp.broadcast_to(2 * jnp.arange(COMPLETION), completions.shape)
  cache = lm.init_cache(len(LENGTHS), GROUP_SIZE, COMPLETION)
  outputs = []
  for t in range(COMPLETION):
    new = completions[..., t : t + 1], cache, spread[..., t : t + 1]
    logits, cache = extend(params, prefix, *new)
    outputs.append(logits)
  logits = jnp.concatenate(outputs, axis=2)
  whole = jax.jit(bare_logits)
  for b, length in enumerate(LENGTHS):
    row = jnp.concatenate([prompts[b, :length], completions[b, 0]])[None]
    positions = jnp.concatenate([jnp.arange(length), length + spread[b, 0]])
    expected = whole(params, row, positions[None], jnp.ones_like(row))
    np.testing.assert_allclose(logits[b, 0], expected[0, length:], atol=1e-5)


def test_packed_rows_are_refused():
  lm, params, _ = bare_case()
  prompts, mask, completions = ids_and_mask()
  prefix = lm.prefill(params, prompts, mask)
  with pytest.raises(ValueError, match="one completion a row"):
    lm.extend(params, prefix, completions, segments=jnp.zeros_like(completions))


@pytest.mark.slow
def test_nnx_parameters_are_plain_and_the_module_is_left_alone():
  module = Nnx(nnx.Rngs(1))
  lm = adapters.from_nnx(module)
  params = lm.init(jax.random.key(0))
  prompts, mask, completions = ids_and_mask()
  jax.jit(lm.extend)(params, lm.prefill(params, prompts, mask), completions)
  assert params.keys() == {"embed", "positions", "attend", "head"}
  assert params["head"].keys() == {"kernel", "bias"}
  assert isinstance(params["head"]["kernel"], jax.Array)
  assert not module.dropout.deterministic
  jax.tree.map(lambda x: x.delete(), params)  # As donation to a jit would.
  assert np.isfinite(module(completions[0])).all()


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
  prompts, mask, _ = ids_and_mask()
  for _ in range(2):
    logits = jax.jit(lambda params: lm.prefill(params, prompts, mask))(params)
    row = params["embed"]["embedding"][prompts[0, LENGTHS[0] - 1]]
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
@pytest.mark.parametrize(
  "is_causal", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_a_model_that_is_not_causal_is_refused(is_causal):
  def apply(params, ids, positions, mask):
    seen = params["embed"][ids] * mask[..., None]
    logits = jnp.cumsum(seen, axis=1) @ params["head"]
    if is_causal:
      return logits
    total = jnp.sum(seen, axis=(1, 2), keepdims=True)
    return logits + 0.02 * total * jnp.arange(VOCAB)

  lm = adapters.from_apply(apply, bare_init)
  params = lm.init(jax.random.key(0))
  if is_causal:
    return adapters.check_causal(lm, params)
  with pytest.raises(ValueError, match="the model is not causal"):
    adapters.check_causal(lm, params)


def test_a_row_longer_than_the_positions_is_refused():
  lm = adapters.from_nnx(lambda rngs: Nnx(rngs))
  params = lm.init(jax.random.key(0))
  adapters.check_causal(lm, params, length=MAX_LENGTH)
  with pytest.raises(ValueError, match="17 tokens are nan.* fewer positions"):
    adapters.check_causal(lm, params, length=MAX_LENGTH + 1)
