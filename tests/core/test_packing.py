"""Packed rows: where tokens lie, and that nothing else depends on it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

from grpojax.core import (
  losses,
  micro_batches,
  packing,
  packing_layout,
  surrogates,
)
from grpojax.core.batch import make_batch
from grpojax.core.grpo_step import init_state
from grpojax.core.mesh import AXES
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
  """Rows of 4 are half of T; a subgroup has one or four of them."""
  found = packing_layout.layout(np.array([[4, 1, 4, 3]]), 8, 16)
  assert (found.prompts, found.subgroups.tolist()) == ([[0]], [[0] * 4])
  rows = found.rows
  np.testing.assert_array_equal(
    rows.segments, [[[[0] * 4, [2] * 4, [3, 3, 3, 1], [-1] * 4]]]
  )
  np.testing.assert_array_equal(
    rows.positions, [[[[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 0], [0] * 4]]]
  )
  np.testing.assert_array_equal(rows.rows, [[[0, 2, 1, 2]]])
  np.testing.assert_array_equal(rows.starts, [[[0, 3, 0, 0]]])
  np.testing.assert_array_equal(rows.lengths, [[[4, 1, 4, 3]]])


def test_subgroups_by_hand():
  """A prompt that needs three rows has three subgroups of one."""
  lengths = np.array([[4, 4, 1, 3], [1, 0, 0, 1], [0, 0, 0, 0]])
  found = packing_layout.layout(lengths, 4, 1)
  np.testing.assert_array_equal(found.prompts, [[0, 0, 0, 1]])
  np.testing.assert_array_equal(
    found.subgroups, [[0, 1, 2, 2], [3, 4, 4, 3], [4, 4, 4, 4]]
  )
  np.testing.assert_array_equal(
    found.rows.lengths,
    [[[4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 1, 3], [1, 0, 0, 1]]],
  )
  np.testing.assert_array_equal(
    found.rows.segments[0, 2:], [[[3, 3, 3, 2]], [[0, 3, -1, -1]]]
  )
  # A long prompt is not computed three times: one subgroup a prompt.
  longer = packing_layout.layout(lengths, 4, 20)
  assert longer.rows.segments.shape == (1, 2, 4, 4)
  # Each prompt in a block of its own: as many subgroups as the first needs.
  apart = packing_layout.layout(lengths, 4, 1, blocks=3)
  assert apart.rows.segments.shape == (3, 3, 1, 4)
  np.testing.assert_array_equal(apart.prompts, np.zeros((3, 3)))


def draw_lengths(rng, b=B, g=G, t=T):
  lengths = np.minimum(rng.geometric(rng.uniform(0.05, 0.9), (b, g)) - 1, t)
  return np.where(rng.uniform(size=b) < 0.1, 0, lengths.T).T


@pytest.mark.parametrize(
  "prompt_length, blocks, together, parts",
  [(0, 1, 1, 1), (3, 1, 1, 3), (9, 4, 2, 1), (3, 2, 1, 2), (2, 4, 2, 4)],
)
def test_each_real_token_lies_somewhere_once(
  prompt_length, blocks, together, parts
):
  rng, sizes = np.random.default_rng(blocks), set()
  ids = 1 + np.arange(B * G * T).reshape(B, G, T)
  for _ in range(100):
    lengths = draw_lengths(rng)
    mask = np.arange(T) < lengths[..., None]
    found = packing_layout.layout(
      lengths, T, prompt_length, blocks, together, parts
    )
    if found is None:
      continue
    rows = found.rows
    c, m, r, w = rows.segments.shape
    sizes.add((m, r, w))
    whole = B * (prompt_length + G * T)
    assert c * m * (prompt_length + r * w) < whole
    assert c == blocks and w >= lengths.max()
    # Cut up, no part has more tokens than one of the batch as it is.
    assert any(
      together * m % n == 0
      and c * m * (prompt_length + r * w) / n <= whole / parts
      for n in range(1, parts + 1)
    )
    # Counted by token ids, whose prompt is that of the subgroup.
    prompt = found.prompts + (B // c) * np.arange(c)[:, None]
    tokens = ids[prompt[:, :, None, None], rows.segments, rows.positions]
    tokens = np.where(rows.segments >= 0, tokens, 0)
    np.testing.assert_array_equal(np.sort(tokens[tokens > 0]), ids[mask])
    assert rows.lengths.sum() == lengths.sum()
    # A completion's tokens lie in their order, from where it starts.
    for i, g in np.argwhere(lengths):
      at = i // (B // c), found.subgroups[i, g]
      row, start = rows.rows[*at, g], rows.starts[*at, g]
      assert rows.lengths[*at, g] == lengths[i, g]
      np.testing.assert_array_equal(
        tokens[*at, row, start : start + lengths[i, g]], ids[i, g][mask[i, g]]
      )
  assert len(sizes) > 3


def test_sizes_are_few():
  assert packing_layout.row_counts(1) == [1]
  assert packing_layout.row_counts(6) == [1, 4, 6]
  assert packing_layout.row_counts(2) == [1, 2]
  assert packing_layout.row_counts(64) == [1, 4, 16, 64]
  assert packing_layout.row_lengths(1024) == [256, 512, 1024]
  assert packing_layout.row_lengths(6) == [2, 3, 6]
  assert packing_layout.row_lengths(1) == [1]
  counts = {packing_layout.subgroup_count(n, 4) // 4 for n in range(130)}
  assert counts == {*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40}


@pytest.mark.parametrize("parts", [4, 64])
def test_shapes_are_few_as_lengths_drift(parts):
  rng, shapes = np.random.default_rng(0), set()
  for step in range(60):
    mean = 128 + 30 * np.sin(step / 9)
    lengths = np.clip(rng.normal(mean, mean / 3, (64, 16)), 1, 512).astype(int)
    found = packing_layout.plan(lengths, 512, 128, micro_batches=parts)
    shapes.add(found.rows.segments.shape)
  assert 3 < len(shapes) < 12


def test_no_packing_where_it_saves_nothing():
  assert packing_layout.layout(np.full((B, G), T), T) is None
  full = np.full((B, G), T // 2 + 1)  # no two share a row
  assert packing_layout.layout(full, T) is None
  nothing = packing_layout.layout(np.zeros((B, G), int), T)
  assert nothing.rows.segments.shape == (1, 1, 1, T // 4)


def test_what_cannot_be_packed_is_refused():
  with pytest.raises(ValueError, match="0 to 3 tokens, not 4"):
    packing_layout.layout(np.array([[4, 1]]), 3)
  with pytest.raises(ValueError, match="3 samples cannot be cut into 2"):
    packing_layout.plan(np.ones((1, 3), int), 3, micro_batches=2)
  found = packing_layout.layout(np.ones((3, 4), int), 8, 8)
  rows = packing.merged_rows(found)
  assert packing.cuts(rows, (3, 4, 8), 8, 6) == (3, 1)
  with pytest.raises(ValueError, match="3 packed subgroups .* into 2 micro-"):
    packing.cuts(rows, (3, 4, 2), 8, 2)  # 3 of 12 tokens, of 48 that were


def test_unpacked_is_what_was_packed():
  lengths = np.array([[2, 0, 7, 1], [0, 0, 0, 0], [7, 8, 6, 0], [1, 1, 1, 1]])
  mask = np.arange(8) < lengths[..., None]
  values = jax.random.normal(KEY, mask.shape)
  found = packing_layout.layout(lengths, 8, 1, blocks=2)
  assert found.rows.segments.shape == (2, 4, 1, 8)

  @jax.jit
  def there_and_back(values, found):
    rows = packing.merged_rows(found)
    packed = packing.pack(packing.regroup(values, found), rows)
    return packing.ungroup(packing.unpack(packed, rows, 8), found)

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
    inputs = samples.prompt_ids, samples.prompt_mask, samples.completion_ids
    if layout is not None:
      rows = packing.merged_rows(layout)
      inputs = *packing.regroup(inputs, layout), rows

    def objective(params):
      both = packing.completion_logprobs(
        lm, params, *inputs, sampling=Sampling(temperature=0.7), chunk_size=5
      )
      if layout is not None:
        both = [packing.ungroup(x, layout) for x in both]
      logprobs, entropy = (jnp.where(real, x, 0) for x in both)
      weights = jnp.sin(jnp.arange(real.size).reshape(real.shape))
      return jnp.sum(weights * logprobs), (logprobs, entropy)

    return jax.grad(objective, has_aux=True)(params)

  # As for long prompts, so that a subgroup has several rows.
  layout = packing_layout.layout(lengths, T, 100)
  assert layout.rows.segments.shape == (1, 3, 4, T)
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
  "minibatches, micro_batches, shape",
  [
    pytest.param(2, 6, (B, 3, 1, T // 2), marks=pytest.mark.slow),
    pytest.param(1, 6, (1, 4, 1, T), marks=pytest.mark.slow),
    (2, 4, (B, 3, 1, T // 2)),
    (1, 8, (1, 4, 1, T)),
  ],
)
def test_a_packed_step_is_an_unpacked_one(
  tiny, tabular, minibatches, micro_batches, shape
):
  """Epochs, minibatches, cut groups, GSPO, missing rewards, empty rows."""
  lengths, samples = draw_samples(longest=T // 2)
  rewards = np.random.default_rng(3).normal(size=(B, G))
  rewards[0, 2], rewards[2, 5] = np.nan, np.inf
  lengths = np.where(np.isfinite(rewards), lengths, 0)
  layout = packing_layout.plan(lengths, T, P, minibatches, micro_batches)
  assert layout.rows.segments.shape == shape
  lm, params = tabular.lm(11, 11), None
  params = lm.init(KEY)
  if micro_batches % 3 == 0:  # with attention, which takes a while to compile
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
  program = jax.jit(lambda packing_: packing.regroup(jnp.zeros(B), packing_))
  for _ in range(20):
    lengths = rng.integers(0, 1 + rng.integers(1, T), (B, G))
    layout = packing_layout.plan(lengths, T, P, micro_batches=2)
    if layout is not None:
      sizes.add(layout.rows.segments.shape)
      program(layout)
  assert program._cache_size() == len(sizes) > 3


@pytest.mark.parametrize(
  "sizes, parts",
  [
    ((50, 100, 8, 4), 2),  # half as many tokens, in half as many parts
    ((51, 100, 8, 4), 4),  # two would be too large, and three do not divide
    ((51, 100, 9, 4), 3),
    ((1, 100, 7, 4), 1),
    ((100, 100, 8, 4), 4),
    ((100, 100, 6, 4), None),
    ((200, 100, 8, 4), None),  # no batch that is packed
  ],
)
def test_packed_parts_are_few_and_no_larger(sizes, parts):
  assert micro_batches.packed_parts(*sizes) == parts


@pytest.mark.parametrize("devices, parts", [(1, 4), (4, 6)])
def test_packed_parts_stay_spread_over_devices(devices, parts):
  """24 subgroups are cut into four, but the six of a device are not."""
  of_rows, of_samples = jnp.zeros((24, 1, 8), int), jnp.zeros((24, G), int)
  rows = packing.Rows(*[of_rows] * 2, *[of_samples] * 3)
  mesh = AbstractMesh((devices, 1, 1, 1), AXES)
  with jax.sharding.use_abstract_mesh(mesh):
    # 24 * 10 tokens of 12 * (2 + 2 * 14): four of six parts are no larger.
    assert packing.cuts(rows, (12, 2, 14), 2, 6) == (parts, 1)


def test_a_packed_update_has_fewer_micro_batches(tabular):
  lengths, samples = draw_samples(longest=T // 2)
  layout = packing_layout.plan(lengths, T, P, 1, 4)
  assert layout.rows.segments.shape == (1, 4, 1, T)
  lm, tx = tabular.lm(11, 11), optax.sgd(0.1)
  update = make_update(lm, tx, micro_batches=4)

  @jax.make_jaxpr
  def step(layout):
    rewards = jnp.ones((B, G))
    batch = make_batch(lm, samples, rewards, packing=layout)
    return update(init_state(lm.init(KEY), tx, KEY), batch)

  def loops(packed):
    return set(re.findall(r"length=(\d+)", str(step(packed))))

  assert loops(None) == {"4", "1"}
  assert loops(layout) == {"1"}  # of 76 tokens; there were 99 in each of the 4
