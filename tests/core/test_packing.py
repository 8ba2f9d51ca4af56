"""Packing: its layouts, and that it changes neither values nor gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core import packing
from grpojax.core.batch import make_batch
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.meshes import AXES
from grpojax.core.objective import Objective
from grpojax.core.packing import flat_tokens, packed_logprobs
from grpojax.core.packing import layout as packing_layout
from grpojax.core.packing.flat_tokens import FlatTokens
from grpojax.core.step import init_state
from grpojax.core.types import Rollout
from grpojax.core.update import UpdateOptions, make_update
from grpojax.models import lora
from grpojax.models.gated_delta import Sizes
from grpojax.models.rope import Rope
from grpojax.models.transformer import TransformerConfig, transformer

B = 4
G = 6
P = 3
T = 16
KEY = jax.random.key(5)


# Layouts.


def test_a_packing_by_hand():
  """Rows are T / 2 = 4 wide; the second prompt has no rows."""
  lengths = np.array([[4, 1, 4, 3], [0] * 4, [2, 1, 0, 1]])
  planned = packing_layout.plan(lengths, 8, np.array([5, 5, 4]), 6)
  rows = planned.rows
  samples = [[0] * 4, [2] * 4, [3, 3, 3, 1], [0, 0, 1, 3], [-1] * 4]
  places = [[*range(4)], [*range(4)], [0, 1, 2, 0], [0, 1, 0, 0], [0] * 4]
  assert rows.sample_of_token.tolist() == [[samples]]
  assert rows.position_of_token.tolist() == [[places]]
  assert rows.prompt_of_row.tolist() == [[[0, 0, 0, 1, 0]]]
  assert planned.prompt_of_copy.tolist() == [[[0, 2]]]
  assert planned.copy_of_sample.tolist() == [[0] * 4, [2] * 4, [1, 1, 2, 1]]
  # Room for 16 completion tokens, and for 9 prompt tokens, 3/4 of 2 x 6.
  assert rows.sizes == packing.Sizes(1, 1, 16, 9, 12)


def draw_lengths(rng, b=B, g=G, t=T):
  lengths = np.minimum(rng.geometric(rng.uniform(0.05, 0.9), (b, g)) - 1, t)
  return np.where(rng.uniform(size=b) < 0.1, 0, lengths.T).T


@pytest.mark.slow
@pytest.mark.parametrize(
  "prompt_length, devices, minibatches, micro_batches",
  [(0, 1, 1, 1), (3, 1, 1, 6), (9, 2, 1, 2), (3, 1, 2, 1), (2, 2, 2, 3)],
)
def test_each_real_token_has_one_place(
  prompt_length, devices, minibatches, micro_batches
):
  rng = np.random.default_rng(devices)
  sizes = set()
  mesh = AbstractMesh((devices, 1, 1, 1), AXES)
  for _ in range(50):
    lengths = draw_lengths(rng)
    prompts = rng.integers(0, prompt_length + 1, B)
    with jax.sharding.use_abstract_mesh(mesh):
      planned = packing_layout.plan(
        lengths, T, prompts, prompt_length, minibatches, micro_batches
      )
    if planned is None:
      continue
    rows = planned.rows
    sizes.add((planned.prompt_of_copy.shape, rows.position_of_token.shape))
    assert rows.sizes.devices == devices
    assert rows.sample_of_token.shape[-1] >= lengths.max()
    check_tokens(planned, lengths)
    check_room(planned, prompts)
    check_size(planned, prompt_length, minibatches * micro_batches)
  assert len(sizes) > 3


def check_tokens(planned, lengths):
  """Checks that each completion is contiguous in a row of its prompt."""
  rows = planned.rows
  bundles, splits, u = planned.prompt_of_copy.shape
  of_bundle = B // bundles
  real = rows.sample_of_token >= 0
  assert real.sum() == lengths.sum()
  for prompt, sample in np.ndindex(B, G):
    length = lengths[prompt, sample]
    copy = planned.copy_of_sample[prompt, sample]
    if length == 0:
      assert copy == splits * u
      continue
    bundle, (split, copy) = prompt // of_bundle, divmod(copy, u)
    assert planned.prompt_of_copy[bundle, split, copy] == prompt % of_bundle
    is_sample = rows.sample_of_token[bundle, split] == sample
    is_sample &= rows.prompt_of_row[bundle, split][:, None] == copy
    row, place = np.nonzero(is_sample)
    assert_array_equal(row, [row[0]] * length)
    assert_array_equal(place, place[0] + np.arange(length))
    positions = rows.position_of_token[bundle, split, row, place]
    assert_array_equal(positions, np.arange(length))


def check_room(planned, prompts):
  """Checks that a micro-batch has room for any of the bundles."""
  rows = planned.rows
  bundles, splits, _ = planned.prompt_of_copy.shape
  real = rows.sample_of_token >= 0
  prompt_tokens = np.zeros((bundles, splits), int)
  for at in np.ndindex(bundles, splits):
    copies = set(rows.prompt_of_row[at][real[at].any(axis=-1)])
    in_bundle = planned.prompt_of_copy[at][sorted(copies)]
    prompt_tokens[at] = prompts[in_bundle + at[0] * B // bundles].sum()
  on_device = rows.sizes.bundles // rows.sizes.devices
  largest = lambda x: np.sort(x, axis=None)[-on_device:].sum()
  assert largest(real.sum(axis=(2, 3))) <= rows.sizes.tokens
  assert largest(prompt_tokens) <= rows.sizes.prompt_tokens


def check_size(planned, prompt_length, parts):
  """Checks that micro-batches are not larger than unpacked ones."""
  most = B * (prompt_length + G * T) * planned.micro_batches() / parts
  assert memory_in_tokens(planned, prompt_length) <= most


def memory_in_tokens(planned, prompt_length):
  """Returns the memory: a third follows tokens, two thirds padded tokens."""
  rows = planned.rows
  room = rows.sizes.devices * (rows.sizes.tokens + rows.sizes.prompt_tokens)
  padded_prompts = planned.prompt_of_copy.size * prompt_length
  padded = rows.sample_of_token.size + padded_prompts
  return (planned.micro_batches() * room + 2 * padded) / 3


def test_shapes_are_few_as_lengths_drift():
  rng = np.random.default_rng(0)
  shapes = set()
  for step in range(60):
    mean = 128 + 30 * np.sin(step / 9)
    lengths = np.clip(rng.normal(mean, mean / 3, (64, 16)), 1, 512).astype(int)
    prompts = np.clip(rng.normal(90, 20, 64), 1, 128).astype(int)
    planned = packing_layout.plan(lengths, 512, prompts, 128, micro_batches=4)
    tokens = planned.rows.sample_of_token
    copies = planned.prompt_of_copy
    shapes.add((tokens.shape, copies.shape, planned.rows.sizes))
  assert 3 < len(shapes) < 15


def test_a_full_batch_is_not_packed():
  prompts = np.full(B, 4)
  full = packing_layout.plan(np.full((B, G), T), T, prompts, 4)
  assert full is None
  # Samples do not share rows, but little more than half of the tokens is real.
  half = packing_layout.plan(np.full((B, G), T // 2 + 1), T, prompts, 4)
  assert half.rows.sample_of_token.shape == (1, 1, B * G, T)
  assert half.rows.sizes.tokens < 0.7 * B * G * T
  empty = packing_layout.plan(np.zeros((B, G), int), T, prompts, 4)
  assert empty.rows.sample_of_token.shape == (1, 1, 1, T // 4)
  assert empty.rows.sizes.tokens == 1


def test_a_packing_requires_equal_and_small_micro_batches():
  lengths = np.ones((1, 3), int)
  prompts = np.array([1])
  with pytest.raises(ValueError, match="3 samples cannot be divided into 2"):
    packing_layout.plan(lengths, 3, prompts, 1, micro_batches=2)
  planned = packing_layout.plan(np.ones((3, 4), int), 8, np.ones(3, int), 8)
  ids = jnp.ones((3, 8))
  batch = Rollout(ids, ids, jnp.ones((3, 4, 8)), None, None, None)
  jax.eval_shape(lambda: packing.split(batch, planned, 1))
  with pytest.raises(ValueError, match="1 micro-batches may be larger than 2"):
    packing.split(batch, planned, 2)


# Flat arrays of real tokens.

REAL = [[[1, 1, 1, 0], [0, 0, 0, 0]], [[1, 1, 0, 1], [1, 0, 0, 0]]]
REAL = np.array(REAL, bool)


def test_tokens_without_room_are_dropped():
  index = flat_tokens.find_tokens(jnp.asarray(REAL), 1, 3)
  assert np.sum(index.token_of_place < 3) == 3
  np.testing.assert_array_equal(index.place_of_token, [[0, 1, 2]])


@pytest.mark.parametrize("devices, size", [(1, 9), (2, 4)])
def test_flatten_and_unflatten_are_gathers(devices, size):
  index = flat_tokens.find_tokens(jnp.asarray(REAL), devices, size)
  choose = np.zeros((devices, size, devices, 16 // devices))
  for device, real in enumerate(REAL.reshape(devices, -1)):
    places = np.flatnonzero(real)
    choose[device, np.arange(len(places)), device, places] = 1
  choose = choose.reshape(devices * size, 16)
  x = jax.random.normal(KEY, (2, 2, 4, 3))
  flat = jax.random.normal(KEY, (devices, 1, size, 3))

  @jax.jit
  def both_ways(x, flat):
    there, there_vjp = jax.vjp(lambda x: flat_tokens.flatten(x, index), x)
    back, back_vjp = jax.vjp(
      lambda flat: flat_tokens.unflatten(flat, index, x.shape[:3]), flat
    )
    return (there, back_vjp(x)[0]), (back, there_vjp(flat)[0])

  results = both_ways(x, flat)
  matrices = (choose, x.reshape(16, 3)), (choose.T, flat.reshape(-1, 3))
  for values, (matrix, y) in zip(results, matrices, strict=True):
    for value in values:
      expected = np.float32(matrix @ y)
      np.testing.assert_array_equal(np.reshape(value, (-1, 3)), expected)
  text = both_ways.lower(x, flat).as_text()
  assert "gather" in text and "scatter" not in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_shared_prompts_are_summed_in_float32(dtype):
  """300 times 1/256 is 1.17; a sum in bfloat16 would stop at 1."""
  prompt_of_row = jnp.array([[0] * 300 + [2]])
  none = flat_tokens.find_tokens(jnp.zeros((301, 1, 1), bool), 1, 1)
  flat = FlatTokens(none, none, prompt_of_row)
  x = jnp.arange(6, dtype=dtype).reshape(3, 2)
  shared, back = jax.vjp(flat.of_rows, x)
  np.testing.assert_array_equal(shared, x[prompt_of_row[0]])
  data = jnp.full((301, 2), 1 / 256, dtype)
  # CPUs always sum products of bfloat16 in float32, so look at the program.
  assert "preferred_element_type=float32" in str(jax.make_jaxpr(back)(data))
  (gradient,) = back(data)
  assert gradient.dtype == dtype
  expected = np.array([300 / 256, 0, 1 / 256])[:, None] * np.ones(2)
  np.testing.assert_allclose(np.float32(gradient), expected, 4e-3)


# Values and gradients.

SHAPE = dict(vocab_size=11, width=8, heads=4, kv_heads=2, head_dim=4)
SHAPE |= dict(layers=2, mlp=12)
FEATURES = dict.fromkeys(
  ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "norm_offset", "post_norms"),
  True,
)
FEATURES |= dict(attention_cap=2.0, logits_cap=3.0, window=4)
FEATURES |= dict(local_layers=(True, False), local_rope=Rope(theta=30.0))
OTHER_FEATURES = dict(wide_qk_norm=True, pre_norms=False, post_norms=True)
OTHER_FEATURES |= dict(residual_scale=0.4, logits_divisor=0.5)
OTHER_FEATURES["rope"] = Rope(share=0.5, query_beta=0.5, original_length=3)
EXPERTS = dict(experts=4, experts_per_token=2)
LINEAR = dict(linear_layers=(True, False), linear=Sizes(1, 2, 4, 3))


def normal(shapes, seed=0, deviation=0.5):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(deviation * rng.normal(size=x.shape), x.dtype), shapes
  )


def draw_samples(longest=T, vocab=11):
  """Returns completions of 0 to T tokens; the last prompt is padding."""
  rng = np.random.default_rng(1)
  lengths = np.minimum(rng.geometric(0.3, (B, G)), longest)
  lengths[1, 1] = 0
  lengths[0, 0] = longest
  lengths[-1] = 0
  mask = jnp.arange(T) < jnp.asarray(lengths)[..., None]
  return lengths, Rollout(
    prompt_ids=jnp.asarray(rng.integers(0, vocab, (B, P))),
    prompt_mask=jnp.arange(P) < jnp.array([[3], [1], [2], [0]]),
    completion_ids=jnp.asarray(rng.integers(0, vocab, (B, G, T))),
    completion_mask=mask,
    logprobs=jnp.where(mask, -jnp.asarray(rng.uniform(1, 4, mask.shape)), 0.0),
    finished=jnp.ones((B, G), bool),
  )


def assert_near(result, expected, tolerance):
  """Compares with a tolerance relative to the largest number."""
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
  options = {"rtol": 0, "atol": tolerance * scale}
  for x, y in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
    assert_allclose(np.float32(x), np.float32(y), **options)


def differentiate(lm, params, samples, layout):
  """Returns gradients, and log-probabilities and entropies of real tokens."""
  real = samples.completion_mask
  rows = None
  if layout is not None:
    split = packing.split(samples, layout)
    samples, _, rows = jax.tree.map(lambda x: x[0], split)

  def objective(params):
    options = {"sampling": Sampling(temperature=0.7), "chunk_size": 5}
    both = packed_logprobs.completion_logprobs(
      lm, params, samples.tokens, rows, **options
    )[:2]
    if layout is not None:
      both = [packing.join(x[None], layout, (B, G)) for x in both]
    logprobs, entropy = (jnp.where(real, x, 0) for x in both)
    weights = jnp.sin(jnp.arange(real.size).reshape(real.shape))
    return jnp.sum(weights * logprobs), (logprobs, entropy)

  return jax.grad(objective, has_aux=True)(params)


@pytest.mark.slow
@pytest.mark.parametrize(
  "features, adapted",
  [
    (FEATURES, False),
    (EXPERTS, False),
    (OTHER_FEATURES, False),
    (LINEAR, False),
    pytest.param(FEATURES, True, marks=pytest.mark.long),
  ],
)
def test_packing_does_not_change_logprobs_and_gradients(features, adapted):
  lm = transformer(TransformerConfig(**SHAPE | features))
  # Larger weights would saturate the softmax and increase rounding errors.
  params = normal(jax.eval_shape(lm.init, KEY), deviation=0.25)
  if adapted:
    adapters = lora.init(params, KEY, 2, "layers/(q|k|v|o)")
    adapters = normal(adapters, 1, deviation=0.25)
    lm = lora.adapt(lm, params, 1.0)
    params = adapters
  lengths, samples = draw_samples()
  of_prompts = np.asarray(samples.prompt_mask).sum(axis=-1)
  layout = packing_layout.plan(lengths, T, of_prompts, P)
  assert layout.rows.sample_of_token.shape == (1, 1, 8, T)
  run = jax.jit(lambda layout: differentiate(lm, params, samples, layout))
  for x, y in zip(run(layout), run(None), strict=True):
    assert_near(x, y, 2e-6)


@pytest.mark.slow
def test_prompts_longer_than_planned_give_nan(tiny):
  lengths = np.array([[3, 1], [2, 2]])
  known = np.array([2, 1])
  layout = packing_layout.plan(lengths, 8, known, 8)
  prompts = jnp.ones((2, 8), int)
  ids = jnp.ones((2, 2, 8), int)

  @jax.jit
  def packed(layout, mask):
    samples = Rollout(prompts, mask, ids, None, None, None)
    parts = packing.split(samples, layout)
    part, _, rows = jax.tree.map(lambda x: x[0], parts)
    args = tiny.lm, tiny.params, part.tokens, rows
    return packed_logprobs.completion_logprobs(*args)[0]

  real = np.arange(8) < lengths[..., None]
  for longest, fit in ((known, True), (known + 7, False)):
    result = packed(layout, jnp.arange(8) < longest[:, None])
    assert np.isfinite(result)[real].all() == fit
    assert np.isnan(result)[real].all() != fit


def make_step(lm, samples, rewards, **cuts):
  """Returns the step from params to params, metrics and log-probabilities."""
  tx = optax.sgd(0.1)
  options = UpdateOptions(chunk_size=5, **cuts)
  gspo = {"ratio": "sequence_ratio", "weighting": "sequence_mean"}
  objective = Objective(beta=0.1, old_logprobs="trainer", **gspo)
  in_reward = dataclasses.replace(objective, kl_placement="reward")
  update = make_update(lm, tx, objective, options)

  @jax.jit
  def step(params, layout):
    batch = make_batch(
      *(lm, samples, rewards, in_reward),
      options=options,
      ref_params=jax.tree.map(lambda x: 0.9 * x, params),
      policy_params=params,
      packing=layout,
    )
    state, metrics = update(init_state(params, tx, KEY), batch)
    real = batch.completion_mask
    old = batch.old_logprobs
    ref = batch.ref_logprobs
    return state.params, metrics, [jnp.where(real, x, 0) for x in (old, ref)]

  return step


@pytest.mark.parametrize(
  "minibatches, micro_batches, shape",
  [
    pytest.param(2, 12, (B, 6, 1, T // 2), marks=pytest.mark.long),
    pytest.param(2, 4, (B, 1, 3, T // 2), marks=pytest.mark.slow),
    (1, 8, (1, 2, 4, T // 2)),
  ],
)
def test_packing_does_not_change_a_step(
  tiny, tabular, minibatches, micro_batches, shape
):
  """With epochs, minibatches, split groups, GSPO and missing rewards."""
  lengths, samples = draw_samples(longest=T // 2)
  rewards = np.random.default_rng(3).normal(size=(B, G))
  rewards[0, 2] = np.nan
  rewards[2, 5] = np.inf
  lengths = np.where(np.isfinite(rewards), lengths, 0)
  prompts = np.asarray(samples.prompt_mask).sum(axis=-1), P
  layout = packing_layout.plan(lengths, T, *prompts, minibatches, micro_batches)
  assert layout.rows.sample_of_token.shape == shape
  lm = tabular.lm(11, 11)
  params = None
  params = lm.init(KEY)
  if micro_batches % 3 == 0:  # with attention, which compiles slowly
    lm = tiny.lm
    params = tiny.params
  cuts = {"minibatches": minibatches, "micro_batches": micro_batches}
  step = make_step(lm, samples, jnp.asarray(rewards), epochs=2, **cuts)
  result = step(params, layout)
  expected = step(params, None)
  moved = jax.tree.map(jnp.subtract, (result[0], expected[0]), (params, params))
  assert_near(*moved, 1e-4)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(moved)) > 1e-3
  assert_near(result[2], expected[2], 1e-6)
  for name, value in expected[1].items():
    assert_allclose(result[1][name], value, 1e-4, 1e-6, err_msg=name)


def memory(lm, parts, sizes, layout):
  """Returns the bytes of temporary arrays of a compiled step."""
  b, g, t, p = sizes
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  prompts = array(jnp.int32, b, p), array(bool, b, p)
  ids = array(jnp.int32, b, g, t)
  mask = array(bool, b, g, t)
  logprobs = array(jnp.float32, b, g, t)
  done = array(bool, b, g)
  samples = Rollout(*prompts, ids, mask, logprobs, done)
  tx = optax.sgd(0.1)

  def step(params, samples):
    batch = make_batch(lm, samples, jnp.ones((b, g)), packing=layout)
    state = init_state(params, tx, KEY)
    options = UpdateOptions(micro_batches=parts)
    return make_update(lm, tx, options=options)(state, batch)

  params = jax.eval_shape(lm.init, KEY)
  compiled = jax.jit(step).lower(params, samples).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat, wide_heads",
  [pytest.param("selective", False, marks=pytest.mark.long), ("none", True)],
)
def test_packed_micro_batches_take_no_more_memory(remat, wide_heads):
  """Compiled micro-batches of almost the largest size.

  Either rows are full, and heads as wide as hidden states; or rows are almost
  empty except for one completion, and heads are wider.
  """
  sizes = b, g, t, p = (8, 2, 256, 16) if wide_heads else (8, 8, 256, 64)
  lengths = np.random.default_rng(0).integers(130, 178, (b, g))
  if wide_heads:
    lengths[:] = 10
    lengths[0, 0] = t
  config = TransformerConfig(
    vocab_size=256,
    width=128,
    layers=9,  # scanned, see `layer_stacks.SHALLOW`
    heads=8 if wide_heads else 4,
    kv_heads=4,
    head_dim=32,
    mlp=384,
  )
  layout = packing_layout.plan(lengths, t, np.full(b, p), p, 1, 4)
  padded = layout.rows.sample_of_token.size + layout.prompt_of_copy.size * p
  whole = b * (g * t + p) * layout.micro_batches() / 4
  assert 0.95 < memory_in_tokens(layout, p) / whole <= 1
  assert (padded > 1.3 * whole) == wide_heads
  lm = transformer(config, remat=remat)
  assert memory(lm, 4, sizes, layout) < memory(lm, 4, sizes, None)
