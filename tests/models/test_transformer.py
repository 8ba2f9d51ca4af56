"""The decoder's own properties; its logits are compared in test_families.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from grpojax.models import cache as cache_lib
from grpojax.models.attention import two_part_attention
from grpojax.models.transformer import (
  TransformerConfig,
  parameter_shapes,
  transformer,
)

RNG = np.random.default_rng(0)
PROMPTS = jnp.asarray(RNG.integers(0, 11, (2, 4)))
MASK = jnp.array([[True] * 4, [True, True, False, False]])
IDS = jnp.asarray(RNG.integers(0, 11, (2, 3, 5)))


@pytest.fixture(scope="module")
def hidden(tiny):
  """Hidden states of whole completions, compiled once."""

  @jax.jit
  def run(params, prompts, mask, ids):
    prefix = jax.jit(tiny.lm.prefill)(params, prompts, mask)
    return tiny.lm.extend(params, prefix, ids)[0]

  return lambda *args: np.asarray(run(tiny.params, *args))


def test_two_part_attention_is_one_softmax_over_all_keys():
  b, g, k, r, s, c, p, e = 2, 3, 2, 2, 4, 6, 5, 8
  shapes = [(b, g, k, r, s, e), *[(b, g, k, c, e)] * 2, *[(b, k, p, e)] * 2]
  q, *keys_values = (3 * RNG.normal(size=shape) for shape in shapes)
  own_mask = RNG.random((b, g, 1, 1, s, c)) < 0.5
  own_mask[..., 0] = True
  prompt_mask = np.arange(p) < np.array([[5], [2]])
  arrays = jax.tree.map(jnp.asarray, (q, keys_values, own_mask, prompt_mask))
  query, (k1, v1, k2, v2), own, prompt = arrays
  got = two_part_attention(query, (k1, v1), own, (k2, v2), prompt)
  alone = two_part_attention(query, (k1, v1), own)

  def plain(keys, values, mask):
    logits = np.einsum("bgkrse,bgkce->bgkrsc", q, keys) / np.sqrt(e)
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * mask
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bgkrsc,bgkce->bgkrse", weights, values)

  own_keys, own_values, prompt_keys, prompt_values = keys_values

  def joined(prompt_part, own_part):
    part = np.broadcast_to(prompt_part[:, None], (b, g, k, p, e))
    return np.concatenate([part, own_part], 3)

  seen = np.broadcast_to(
    prompt_mask[:, None, None, None, None], (b, g, 1, 1, s, p)
  )
  expected = plain(
    joined(prompt_keys, own_keys),
    joined(prompt_values, own_values),
    np.concatenate([seen, own_mask], -1),
  )
  np.testing.assert_allclose(got, expected, atol=1e-5)
  np.testing.assert_allclose(
    alone, plain(own_keys, own_values, own_mask), atol=1e-5
  )
  assert np.abs(expected - alone).max() > 0.1


def test_an_empty_prompt_takes_no_part():
  q = jnp.asarray(RNG.normal(size=(1, 1, 1, 1, 2, 4)), jnp.float32)
  own = (q[:, :, :, 0], 1 + q[:, :, :, 0])
  prompt = (q[:, 0, :, 0], 9 * q[:, 0, :, 0])
  none = jnp.zeros((1, 2), bool)
  got = two_part_attention(q, own, jnp.ones((2, 2), bool), prompt, none)
  alone = two_part_attention(q, own, jnp.ones((2, 2), bool))
  np.testing.assert_allclose(got, alone, atol=1e-6)


def test_a_sample_reads_its_prompt_and_its_own_past_only(hidden):
  before = hidden(PROMPTS, MASK, IDS)
  after = hidden(PROMPTS, MASK, IDS.at[0, 1, 2].set((IDS[0, 1, 2] + 1) % 11))
  changed = np.abs(after - before).max(-1) > 1e-3
  expected = np.zeros((2, 3, 5), bool)
  expected[0, 1, 2:] = True
  np.testing.assert_array_equal(changed, expected)
  np.testing.assert_array_equal(after[~expected], before[~expected])

  other = PROMPTS.at[0, 1].set((PROMPTS[0, 1] + 1) % 11)
  after = hidden(other, MASK, IDS)
  assert (np.abs(after[0] - before[0]).max(-1) > 1e-3).all()
  np.testing.assert_array_equal(after[1], before[1])


def test_padding_of_a_prompt_is_not_read(hidden):
  before = hidden(PROMPTS, MASK, IDS)
  after = hidden(jnp.where(MASK, PROMPTS, 7), MASK, IDS)
  np.testing.assert_array_equal(after, before)
  shorter = hidden(PROMPTS[1:, :2], MASK[1:, :2], IDS[1:])
  np.testing.assert_allclose(shorter, before[1:], atol=1e-5)


def test_cached_states_are_the_uncached_ones(tiny, hidden):
  """Also for several tokens at a time, in a cache longer than needed."""
  prefix = jax.jit(tiny.lm.prefill)(tiny.params, PROMPTS, MASK)
  cache = tiny.lm.init_cache(2, 3, 8)
  extend = jax.jit(tiny.lm.extend)
  parts = []
  for part in jnp.split(IDS, [1, 2, 3], axis=2):
    states, cache = extend(tiny.params, prefix, part, cache)
    parts.append(states)
  assert cache.index == 5
  np.testing.assert_allclose(
    np.concatenate(parts, 2), hidden(PROMPTS, MASK, IDS), atol=1e-5
  )


def test_one_file_knows_the_order_of_the_caches_axes(tiny, monkeypatch):
  """Decoding is the same where the axes are stored in another order."""

  def decode():
    prefix = tiny.lm.prefill(tiny.params, PROMPTS, MASK)
    cache = tiny.lm.init_cache(2, 3, 7)
    hidden, cache = tiny.lm.extend(tiny.params, prefix, IDS[..., :2], cache)
    last, cache = tiny.lm.extend(tiny.params, prefix, IDS[..., 2:3], cache)
    return jnp.concatenate([hidden, last], 2), cache, prefix

  # Not the same function twice: jit would not trace it again.
  expected, cache, prefix = jax.jit(lambda: decode())()
  assert cache.blocks[0][0].keys.shape == (2, 2, 3, 2, 4, 7)
  monkeypatch.setattr(cache_lib, "ROW_AXES", "kcbeg")
  monkeypatch.setattr(cache_lib, "SLOT_AXES", cache_lib.Slots("ckbeg", "gbcek"))
  monkeypatch.setattr(cache_lib, "PROMPT_AXES", "pekb")
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  got, cache, prefix = jax.jit(lambda: decode())()
  assert cache.blocks[0][0].keys.shape == (2, 7, 2, 2, 4, 3)
  assert prefix.state[0][0].keys.shape == (2, 4, 4, 2, 2)  # L before the others
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_rematerialisation_changes_no_gradient(tiny):
  """Each policy computes more products again than the one before."""
  prefix = jax.jit(tiny.lm.prefill)(tiny.params, PROMPTS, MASK)

  def gradient(remat):
    lm = transformer(tiny.config, remat=remat)

    def objective(params):
      states = lm.extend(params, prefix, IDS)[0]
      return jnp.sin(lm.unembed(params, states)).mean()

    run = jax.jit(jax.grad(objective)).trace(tiny.params)
    products = str(run.jaxpr).count("dot_general")
    return products, run.lower().compile()(tiny.params)

  runs = [gradient(remat) for remat in ("none", "selective", "full")]
  counts, (plain, *others) = zip(*runs, strict=True)
  assert counts[0] < counts[1] < counts[2]
  for grads in others:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, plain
    )


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_shapes(biases, tied):
  config = TransformerConfig(
    vocab_size=13,
    width=6,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=10,
    qkv_bias=biases,
    o_bias=biases,
    mlp_bias=biases,
    tied=tied,
  )
  params = jax.eval_shape(transformer(config).init, jax.random.key(0))
  assert jax.tree.map(lambda x: x.shape, params) == parameter_shapes(config)
  layer = 6 * (32 + 16 + 16) + 32 * 6 + 3 * 6 * 10 + 2 * 6
  layer += (32 + 16 + 16 + 6 + 10 + 10 + 6) if biases else 0
  count = 13 * 6 * (1 if tied else 2) + 3 * layer + 6
  assert sum(x.size for x in jax.tree.leaves(params)) == count
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def test_a_fresh_model_is_nearly_uniform(tiny):
  params = tiny.lm.init(jax.random.key(0))
  layers = params["layers"]
  assert (layers["attn_norm"] == 1).all() and (layers["q_bias"] == 0).all()
  np.testing.assert_allclose(layers["q"].std(), 0.02, rtol=0.2)
  np.testing.assert_allclose(layers["down"].std(), 0.01, rtol=0.2)
  assert (layers["k"] != layers["v"]).any()
  prefix = jax.jit(tiny.lm.prefill)(params, PROMPTS, MASK)
  probs = jax.nn.softmax(tiny.lm.unembed(params, prefix.last_hidden))
  np.testing.assert_allclose(probs, 1 / 11, atol=0.03)


def test_the_cache_has_the_asked_dtype(tiny):
  lm = transformer(tiny.config, dtype=jnp.bfloat16)
  cache = jax.eval_shape(lambda: lm.init_cache(2, 3, 7))
  for keys, values in cache.blocks[0]:
    assert keys.shape == (2, 2, 3, 2, 4, 7) and keys.dtype == jnp.bfloat16
    assert values.shape == (2, 2, 3, 2, 7, 4) and values.dtype == keys.dtype


def test_useless_shapes_are_refused(tiny):
  replace = dataclasses.replace
  with pytest.raises(ValueError, match="heads=4 is no multiple of kv_heads=3"):
    transformer(replace(tiny.config, kv_heads=3))
  with pytest.raises(ValueError, match="head_dim=5 must be even"):
    transformer(replace(tiny.config, head_dim=5))
  prefix = jax.jit(tiny.lm.prefill)(tiny.params, PROMPTS, MASK)
  cache = tiny.lm.init_cache(2, 3, 5)
  with pytest.raises(ValueError, match="segments are for training"):
    tiny.lm.extend(tiny.params, prefix, IDS, cache, segments=IDS)


def test_bfloat16_computes_in_bfloat16_on_float32_parameters(tiny):
  half = transformer(tiny.config, dtype=jnp.bfloat16)
  prompt, ids = jnp.ones((1, 3), int), jnp.arange(8).reshape(1, 2, 4)

  def total(params, lm):
    prefix = lm.prefill(params, prompt, prompt > 0)
    hidden, _ = lm.extend(params, prefix, ids)
    return jnp.sum(lm.unembed(params, hidden) ** 2), hidden.dtype

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(params, lm):
    grads, dtype = jax.grad(total, has_aux=True)(params, lm)
    assert dtype == lm.init_cache(1, 1, 1).blocks[0][0].keys.dtype
    return grads

  grads, exact = (gradient(tiny.params, lm) for lm in (half, tiny.lm))
  cache = half.init_cache(1, 1, 1)
  assert cache.blocks[0][0][0].dtype == jnp.bfloat16
  for ours, want in zip(
    jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True
  ):
    assert ours.dtype == jnp.float32
    scale = float(jnp.abs(want).max())
    assert 0 < float(jnp.abs(ours - want).max()) < 0.1 * scale
