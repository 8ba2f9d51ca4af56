"""Stages and compaction of the decoding loop: equal samples, less work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import hlo, trips
from grpojax.core import decoding as decoding_lib
from grpojax.core import meshes
from grpojax.core.decoding import Compaction, Decoding
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.models import lora
from grpojax.models.transformer import TransformerConfig, transformer

KEY = jax.random.key(3)
B = 3
G = 5
T = 50
LENGTHS = np.array([4, 2, 0])  # the last row is padding of the batch
PROMPTS = Prompts(
  jnp.asarray(np.random.default_rng(0).integers(1, 11, (B, 4))),
  jnp.arange(4) < LENGTHS[:, None],
)
# Samples end early or late; two of the first group use all tokens.
BUDGETS = jnp.asarray([[50, 3, 20, 50, 17], [1, 40, 0, 9, 33], [50] * G])
PLAIN = Decoding(stages=1, compact=False)
SHAPE = dict(vocab_size=11, width=16, heads=4, kv_heads=2, head_dim=4, mlp=24)


@pytest.fixture(autouse=True)
def short_stages(monkeypatch):
  """Compacts stages of 16 tokens, too."""
  monkeypatch.setattr(decoding_lib, "LEAST_TOKENS", 16)


def model(name):
  """Returns a tiny model and large random parameters."""
  changes = {
    "one_stack": {"layers": 9},
    "windows": {"local_layers": (True, False), "window": 5},
    "lora": {},
    "experts": {"experts": 3, "experts_per_token": 2},
  }
  config = TransformerConfig(**SHAPE | {"layers": 2} | changes[name])
  lm = transformer(config)
  rng = np.random.default_rng(1)

  large = lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, jnp.float32)
  fill = lambda shapes: jax.tree.map(large, shapes)
  params = fill(jax.eval_shape(lm.init, jax.random.key(0)))
  if name != "lora":
    return lm, params
  adapters = fill(lora.abstract(params, 2, "layers/(q|up|down)"))
  return lora.adapt(lm, params, 0.5), adapters


def run(lm, params, decoding, budgets=BUDGETS, prompts=PROMPTS, **settings):
  settings = {"group_size": G, "max_new_tokens": T, "eos_ids": (12,)} | settings
  draw = lambda params, budgets: rollout(
    lm, params, prompts, KEY, budgets=budgets, decoding=decoding, **settings
  )
  return jax.jit(draw)(params, budgets)


def assert_same(out, expected):
  for name in ("completion_ids", "completion_mask", "finished"):
    np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
  np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-5)


slow = pytest.mark.slow
long = pytest.mark.long
MODELS = [
  pytest.param("windows", marks=slow),
  pytest.param("one_stack", marks=slow),
  pytest.param("chain", marks=slow),
  pytest.param("simple", marks=slow),
  pytest.param("lora", marks=long),
  pytest.param("experts", marks=long),
]


@pytest.mark.parametrize("name", MODELS)
def test_stages_do_not_change_samples(name, tabular):
  """A chain's samples end at an EOS; a simple cache has one stage."""
  settings = {}
  if name in ("chain", "simple"):
    lm = tabular.lm(3, 11)
    params = lm.init(jax.random.key(5))
    settings = {"eos_ids": (0,), "budgets": None}
    if name == "simple":
      lm = lm._replace(map_cache_rows=None)
  else:
    lm, params = model(name)
  expected = run(lm, params, PLAIN, **settings)
  staged = run(lm, params, Decoding(stages=3), **settings)
  assert_same(staged, expected)
  assert expected.finished.any() == bool(settings)


def watched(lm, axis):
  """Returns a function that runs a model and records its rows per token."""
  rows = []

  def extend(params, prefix, ids, cache=None, **_):
    assert prefix.state.shape == ids.shape[:1]
    jax.debug.callback(lambda n=ids.shape[axis]: rows.append(n))
    return lm.extend(params, prefix, ids, cache)

  def counted(call, **changes):
    del rows[:]
    out = call(lm._replace(extend=extend, **changes))
    out.completion_ids.block_until_ready()
    jax.effects_barrier()
    return out, list(rows)

  return counted


@pytest.mark.slow
def test_groups_shrink_to_their_unfinished_samples(tabular):
  budgets = jnp.asarray([[50, 20, 20, 20, 20], [40, 40, 1, 1, 1], [0] * G])
  table = jnp.zeros((3, 12, 11))
  counted = watched(tabular.lm(3, 11), 1)
  three = Decoding(stages=3)
  _, rows = counted(lambda lm: run(lm, table, three, budgets=budgets))
  # Stages end at tokens 16, 32 and 49. The third starts with one unfinished
  # sample in the first group, and two in the second.
  assert rows == [5] * 32 + [2] * 17


LONG = 150
ONE = jnp.asarray([[1], [150], [60], [3], [0], [150], [52], [9]])  # budgets
ROWS = Prompts(
  jnp.asarray(np.random.default_rng(2).integers(1, 11, (8, 4))),
  jnp.arange(4) < np.array([4, 2, 3, 1, 4, 4, 1, 2])[:, None],
)


def one_each(lm, params, decoding, budgets=ONE):
  settings = {"group_size": 1, "max_new_tokens": LONG}
  return run(lm, params, decoding, budgets, ROWS, **settings)


@pytest.mark.slow
def test_the_batch_shrinks_to_unfinished_prompts(tabular, monkeypatch):
  lm = tabular.lm(3, 11)
  table = lm.init(jax.random.key(5))
  counted = watched(lm, 0)
  three = Decoding(stages=3)
  out, rows = counted(lambda lm: one_each(lm, table, three))
  # Stages end at 48, 96 and 149, with four unfinished prompts, two, and none.
  assert rows == [8] * 96 + [2] * 53
  assert_same(out, one_each(lm, table, PLAIN))
  simple, rows = counted(
    lambda lm: one_each(lm, table, three), map_prefix_rows=None
  )
  assert_same(simple, out)
  assert rows == [8] * 149
  # The last stage is skipped if all are done.
  few = jnp.minimum(ONE, 90)
  _, rows = counted(lambda lm: one_each(lm, table, three, few))
  assert rows == [8] * 89
  # Short stages have one size.
  monkeypatch.setattr(decoding_lib, "LEAST_TOKENS", 48)
  _, rows = counted(lambda lm: one_each(lm, table, Decoding(stages=4)))
  assert rows == [8] * 149


@pytest.mark.parametrize(
  "sizes, shape, expected",
  [
    ((4, 1, 1, 1), (8, 1), Compaction(4, 2, True)),
    ((2, 2, 1, 2), (8, 1), Compaction(4, 2, True)),
    ((4, 2, 1, 1), (8, 1), None),
    ((2, 4, 1, 1), (2, 4), None),  # groups are cut
    ((1, 1, 1, 4), (8, 4), Compaction(8, 4, False)),
  ],
)
def test_prompts_stay_on_their_devices(sizes, shape, expected):
  mesh = jax.sharding.AbstractMesh(
    sizes, meshes.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4
  )
  with jax.sharding.use_abstract_mesh(mesh):
    assert decoding_lib.find_compaction(shape, prompts=True) == expected


def test_compaction_takes_rows_of_each_device():
  halves = Compaction(2, 4, True)
  done = jnp.asarray([1, 1, 0, 1, 0, 1, 1, 1], bool)[:, None]
  order = halves.order(done, 1)
  x = jnp.arange(8)
  np.testing.assert_array_equal(halves.take(x, order), [2, 4])
  new = halves.put(jnp.asarray([-2, -4]), x, order)
  np.testing.assert_array_equal(new, [0, 1, -2, 3, -4, 5, 6, 7])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.int32])
def test_experts_are_unpacked_as_packed(dtype):
  experts = jnp.arange(2 * 3 * 4 * 5, dtype=dtype).reshape(2, 3, 4, 5)
  words = decoding_lib._pack_experts(experts)
  unpacked = decoding_lib.unpack_experts(words, experts[:, 0])
  np.testing.assert_array_equal(unpacked, experts)


@pytest.mark.slow
def test_a_token_copies_neither_cache_nor_weights():
  """The compiled loop copies only small arrays."""
  lm = transformer(TransformerConfig(layers=2, **SHAPE))
  params = jax.eval_shape(lm.init, jax.random.key(0))

  options = {"group_size": G, "max_new_tokens": 65, "eos_ids": (12,)}
  options |= {"decoding": PLAIN}
  sample = lambda params: rollout(lm, params, PROMPTS, KEY, **options)
  module = hlo.parse(jax.jit(sample).lower(params).compile().as_text())
  counts = {}
  for computation in module.computations.values():
    for loop in computation.instructions.values():
      if loop.opcode == "while":
        trip = trips.trip_count(module, computation, loop, {})
        if not trip.exact:
          counts[dict(loop.called)["body"]] = trip.most
  (body,) = counts
  assert counts[body] == 64  # the tokens after the first, at most
  moved = [
    i
    for i in module.computations[body].instructions.values()
    if i.opcode in ("copy", "transpose", "slice", "dynamic-slice")
  ]
  # A layer's cache has 3 * 5 * 2 * 64 * 4 numbers, its smallest matrix 16 * 8.
  assert all(np.prod(i.shapes[0].dims) < 16 * 8 for i in moved), moved
