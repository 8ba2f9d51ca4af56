"""Packed rows: where tokens lie, and that nothing else depends on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import losses, packing, packing_layout, surrogates
from grpojax.core.grpo_step import init_state, make_batch
from grpojax.core.sampling import Sampling
from grpojax.core.types import Rollout
from grpojax.core.update import make_update
from grpojax.models import hf, lora
from grpojax.models.transformer import transformer

B, G, P, T = 4, 6, 3, 16
KEY = jax.random.key(5)


# Layouts.


def test_first_fit_by_hand():
  """Longest first, each into the first row that has room for it."""
  rows, starts = packing_layout.first_fit(np.array([[3, 6, 1, 5, 4, 0]]), 10)
  # 6 | 5 | then 4 beside 6, 3 beside 5, 1 beside 5 and 3: 10 and 9 of 10.
  np.testing.assert_array_equal(rows, [[1, 0, 1, 1, 0, 0]])
  np.testing.assert_array_equal(starts[0, :5], [5, 0, 8, 0, 6])


def test_a_layout_by_hand():
  """Rows of 4 are half of T, and hold as much as fewer rows of 8."""
  found = packing_layout.layout(np.array([[2, 1, 4, 1]]), 8)
  np.testing.assert_array_equal(found.segments, [[[2] * 4, [0, 0, 1, 3]]])
  np.testing.assert_array_equal(found.positions, [[[0, 1, 2, 3], [0, 1, 0, 0]]])
  np.testing.assert_array_equal(found.rows, [[1, 1, 0, 1]])
  np.testing.assert_array_equal(found.starts, [[0, 2, 0, 3]])


def test_a_layout_in_parts_by_hand():
  """Samples 0, 2 and 1, 3 are in parts, whose rows alternate too."""
  found = packing_layout.layout(np.array([[5, 1, 1, 2]]), 6, parts=2)
  _ = -1
  np.testing.assert_array_equal(
    found.segments, [[[0, 0, 0, 0, 0, 2], [3, 3, 1, _, _, _]]]
  )
  np.testing.assert_array_equal(found.rows, [[0, 1, 0, 1]])
  one, other = (
    jax.tree.map(lambda x, p=p: x[p], packing.split(found, (1, 2)))
    for p in (0, 1)
  )
  np.testing.assert_array_equal(one.segments, [[[0, 0, 0, 0, 0, 1]]])
  np.testing.assert_array_equal(other.segments, [[[1, 1, 0, _, _, _]]])
  np.testing.assert_array_equal(other.starts, [[2, 0]])
  assert one.parts == 1


def draw_lengths(rng, b=B, g=G, t=T):
  lengths = np.minimum(rng.geometric(rng.uniform(0.05, 0.9), (b, g)) - 1, t)
  return np.where(rng.uniform(size=b) < 0.1, 0, lengths.T).T


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_real_token_lies_somewhere_once(parts):
  rng, sizes = np.random.default_rng(parts), set()
  ids = np.arange(B * G * T).reshape(B, G, T)
  for _ in range(200):
    lengths = draw_lengths(rng)
    mask = np.arange(T) < lengths[..., None]
    found = packing_layout.layout(lengths, T, parts)
    if found is None:
      continue
    b, r, w = found.segments.shape
    sizes.add((r, w))
    assert (b, r * w < G * T, w >= lengths.max()) == (B, True, True)
    real = found.segments >= 0
    group = np.arange(B)[:, None, None]
    packed = ids[group, found.segments, found.positions][real]
    np.testing.assert_array_equal(np.sort(packed), ids[mask])
    # A sample is in rows of its own part.
    part = (found.segments - np.arange(r)[:, None]) % parts
    assert not part[real].any()
    # A completion's tokens lie in their order, and after nothing of another.
    for i in np.ndindex(B, r):
      changes = np.flatnonzero(np.diff(found.segments[i])) + 1
      for run in np.split(found.positions[i], changes):
        assert (run == np.arange(len(run))).all() or not run.any()
  few = len(packing_layout.row_counts(G // parts)) * len(
    packing_layout.row_lengths(T)
  )
  assert 3 < len(sizes) <= few


def test_sizes_are_few():
  assert packing_layout.row_counts(1) == [1]
  assert packing_layout.row_counts(6) == [1, 2, 3, 4, 6]
  assert packing_layout.row_counts(64) == [
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
  ]
  assert packing_layout.row_lengths(1024) == [256, 512, 1024]
  assert packing_layout.row_lengths(6) == [2, 3, 6]
  assert packing_layout.row_lengths(1) == [1]


def test_no_packing_where_it_saves_nothing():
  assert packing_layout.layout(np.full((B, G), T), T) is None
  full = np.full((B, G), T // 2 + 1)  # no two share a row
  assert packing_layout.layout(full, T) is None
  assert packing_layout.layout(np.zeros((B, G), int), T).segments.shape == (
    B,
    1,
    T // 4,
  )


def test_what_cannot_be_packed_is_refused():
  with pytest.raises(ValueError, match="0 to 3 tokens, not 4"):
    packing_layout.layout(np.array([[4, 1]]), 3)
  with pytest.raises(ValueError, match="groups of 2 .* 4 equal parts"):
    packing_layout.layout(np.array([[1, 1]]), 3, parts=4)
  with pytest.raises(ValueError, match="packed in parts=1 .* into 2"):
    packing.split(packing_layout.layout(np.ones((1, 4), int), 8), (1, 2))


def test_unpacked_is_what_was_packed():
  lengths = np.array([[2, 0, 7, 1], [0, 0, 0, 0]])
  mask = np.arange(8) < lengths[..., None]
  values = jax.random.normal(KEY, mask.shape)
  found = packing_layout.layout(lengths, 8)
  assert found.segments.shape[1] < 4

  @jax.jit
  def there_and_back(values, found):
    return packing.unpack(packing.pack(values, found), found, 8)

  np.testing.assert_array_equal(
    there_and_back(values, found), np.where(mask, values, 0)
  )


# Values and gradients.

SMALL = {
  "vocab_size": 11,
  "hidden_size": 8,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 4,
  "intermediate_size": 12,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
FAMILIES = {
  "qwen2": {"use_sliding_window": True, "sliding_window": 4},
  "qwen3": {"attention_bias": True},
  "llama": {"mlp_bias": True},
  "mistral": {"sliding_window": 4},
  "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 5} | CAPS,
  "gemma3_text": {
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
  },
  "qwen3_moe": {
    "moe_intermediate_size": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
  },
}


def test_every_family_is_here():
  assert FAMILIES.keys() == hf.FAMILIES.keys()


def normal(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), shapes
  )


def draw_samples(longest=T, vocab=11):
  """Completions of 0 to T tokens; the last prompt only pads the batch."""
  rng = np.random.default_rng(1)
  lengths = np.minimum(rng.geometric(0.3, (B, G)), longest)
  lengths[1, 1], lengths[0, 0], lengths[-1] = 0, longest, 0
  mask = jnp.arange(T) < jnp.asarray(lengths)[..., None]
  return lengths, Rollout(
    prompt_ids=jnp.asarray(rng.integers(0, vocab, (B, P))),
    prompt_mask=jnp.arange(P) < jnp.array([[3], [1], [2], [0]]),
    completion_ids=jnp.asarray(rng.integers(0, vocab, (B, G, T))),
    completion_mask=mask,
    logprobs=jnp.where(mask, -jnp.asarray(rng.uniform(1, 4, mask.shape)), 0.0),
    finished=jnp.ones((B, G), bool),
  )


def assert_near(found, expected, tolerance):
  """To a share of the largest number of all."""
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.float32(a), np.float32(b), rtol=0, atol=tolerance * scale
    ),
    found,
    expected,
  )


def check_model(kind, dtype, adapted):
  """Log-probabilities, entropies and gradients, packed and not."""
  hf_config = {"model_type": kind} | SMALL | FAMILIES[kind]
  lm = transformer(hf.to_transformer_config(hf_config), dtype=dtype)
  params = normal(hf.abstract_params(hf_config))
  if adapted:
    adapters = lora.init(params, KEY, 2, "layers/(q|k|v|o)")
    lm, params = lora.adapt(lm, params, 1.0), normal(adapters, 1)
  lengths, samples = draw_samples()
  real = samples.completion_mask

  @jax.jit
  def score(params, layout):
    def objective(params):
      both = packing.completion_logprobs(
        lm,
        params,
        samples.prompt_ids,
        samples.prompt_mask,
        samples.completion_ids,
        layout,
        sampling=Sampling(temperature=0.7),
        chunk_size=5,
      )
      logprobs, entropy = (jnp.where(real, x, 0) for x in both)
      weights = jnp.sin(jnp.arange(real.size).reshape(real.shape))
      return jnp.sum(weights * logprobs), (logprobs, entropy)

    return jax.grad(objective, has_aux=True)(params)

  layout = packing_layout.layout(lengths, T)
  assert layout.segments.shape[1:] == (3, T)
  tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
  both = score(params, layout), score(params, None)
  for found, expected in zip(*both, strict=True):
    assert_near(found, expected, tolerance)


def test_packed_is_unpacked():
  """With windows, caps and adapters."""
  check_model("gemma2", jnp.float32, adapted=True)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_is_unpacked_in_all_families(kind, dtype, adapted):
  check_model(kind, dtype, adapted)


def run_step(lm, params, layout, samples, rewards, ref_params, **cuts):
  """The parameters after a step, its metrics and its batch."""
  tx, sampling = optax.sgd(0.1), Sampling()
  of_batch = dict(cuts, sampling=sampling, chunk_size=5)
  parts = cuts["minibatches"] * cuts["micro_batches"]
  update = make_update(
    lm,
    tx,
    loss=functools.partial(
      losses.grpo_loss, ratio=surrogates.sequence_ratio, beta=0.1
    ),
    weighting=losses.sequence_mean,
    **of_batch,
  )

  @jax.jit
  def step(params, layout):
    batch = make_batch(
      lm,
      samples,
      rewards,
      ref_params=ref_params,
      on_policy=False,
      policy_params=params,
      kl_in_reward=0.1,
      micro_batches=parts,
      chunk_size=5,
      packing=layout,
    )
    state, metrics = update(init_state(params, tx, KEY), batch)
    batch = jax.tree.map(
      lambda x: jnp.where(batch.completion_mask, x, 0),
      (batch.old_logprobs, batch.ref_logprobs),
    )
    return state.params, metrics, batch

  return step(params, layout)


@pytest.mark.parametrize(
  "minibatches, micro_batches, parts",
  [pytest.param(2, 6, 3, marks=pytest.mark.slow), (2, 4, 2)],
)
def test_a_packed_step_is_an_unpacked_one(
  tiny, tabular, minibatches, micro_batches, parts
):
  """Epochs, minibatches, cut groups, GSPO, missing rewards, empty rows."""
  lengths, samples = draw_samples(longest=T // 2)
  rewards = np.random.default_rng(3).normal(size=(B, G))
  rewards[0, 2], rewards[2, 5] = np.nan, np.inf
  lengths = np.where(np.isfinite(rewards), lengths, 0)
  layout = packing_layout.plan(lengths, T, minibatches, micro_batches)
  assert layout.parts == parts and layout.segments[0].size < G * T
  lm, params = tabular.lm(11, 11), None
  params = lm.init(KEY)
  if micro_batches == 6:  # with attention, which takes a while to compile
    lm, params = tiny.lm, tiny.params
  step = functools.partial(
    run_step,
    lm,
    params,
    samples=samples,
    rewards=jnp.asarray(rewards),
    ref_params=jax.tree.map(lambda x: 0.9 * x, params),
    epochs=2,
    minibatches=minibatches,
    micro_batches=micro_batches,
  )
  found, expected = step(layout=layout), step(layout=None)
  moved = jax.tree.map(jnp.subtract, (found[0], expected[0]), (params, params))
  assert_near(*moved, 1e-4)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(moved)) > 1e-3
  assert_near(found[2], expected[2], 1e-6)
  for name, value in expected[1].items():
    np.testing.assert_allclose(found[1][name], value, 1e-4, 1e-6, err_msg=name)


def test_programs_are_few():
  """One for each size, whatever the lengths."""
  rng, sizes = np.random.default_rng(0), set()
  program = jax.jit(lambda layout: packing.pack(jnp.zeros((B, G, T)), layout))
  for _ in range(20):
    lengths = rng.integers(0, 1 + rng.integers(1, T), (B, G))
    layout = packing_layout.plan(lengths, T, micro_batches=2)
    if layout is not None:
      sizes.add(layout.segments.shape)
      program(layout)
  assert program._cache_size() == len(sizes) > 3
