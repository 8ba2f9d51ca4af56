"""Shapes of the token loop: equal samples, less work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_fixtures import single_loop

from grpojax.aot import hlo, trips
from grpojax.core import meshes
from grpojax.core.decoding import compaction
from grpojax.core.decoding import experts as experts_lib
from grpojax.core.rollout import rollout
from grpojax.core.types import Prefix, Prompts
from grpojax.models import lora
from grpojax.models.gated_delta import Sizes
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
SHAPE = dict(vocab_size=11, width=16, heads=4, kv_heads=2, head_dim=4, mlp=24)


@pytest.fixture(autouse=True)
def short_rollouts(monkeypatch):
  """Shrinks the batch of short rollouts, too."""
  monkeypatch.setattr(compaction, "TOKENS", 5)


def model(name):
  """Returns a tiny model and large random parameters."""
  changes = {
    "one_stack": {"layers": 9},
    "windows": {"local_layers": (True, False), "window": 5},
    "linear": {
      "linear_layers": (True, False),
      "linear": Sizes(1, 2, 4, 3),
    },
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


def run(lm, params, budgets=BUDGETS, prompts=PROMPTS, **settings):
  settings = {"group_size": G, "max_new_tokens": T, "eos_ids": (12,)} | settings
  draw = lambda params, budgets: rollout(
    lm, params, prompts, KEY, budgets=budgets, **settings
  )
  return jax.jit(draw)(params, budgets)


def assert_same(out, expected):
  for name in ("completion_ids", "completion_mask", "finished"):
    np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
  np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-5)


LONG = [pytest.param(x, marks=pytest.mark.long) for x in ("lora", "experts")]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["windows", "one_stack", "linear", "chain", "simple", *LONG]
)
def test_shapes_of_the_loop_do_not_change_samples(name, tabular):
  """A chain's samples end at an EOS; a simple cache has one batch size."""
  settings = {}
  if name in ("chain", "simple"):
    lm = tabular.lm(3, 11)
    params = lm.init(jax.random.key(5))
    settings = {"eos_ids": (0,), "budgets": None}
    if name == "simple":
      lm = lm._replace(map_rows=None)
  else:
    lm, params = model(name)
  expected = run(single_loop(lm), params, **settings)
  assert_same(run(lm, params, **settings), expected)
  assert expected.finished.any() == bool(settings)


def watched(lm):
  """Returns a function that runs a model and records its rows per token."""
  rows = []

  def extend(params, prefix, ids, cache=None, positions=None):
    assert prefix.state.shape == ids.shape[:1]
    jax.debug.callback(lambda n=ids.shape[0] * ids.shape[1]: rows.append(n))
    return lm.extend(params, prefix, ids, cache)

  def counted(call, **changes):
    del rows[:]
    out = call(lm._replace(extend=extend, **changes))
    out.completion_ids.block_until_ready()
    jax.effects_barrier()
    return out, list(rows)

  return counted


@pytest.mark.slow
def test_the_batch_shrinks_to_unfinished_rows(tabular, monkeypatch):
  budgets = jnp.asarray([[50, 20, 20, 20, 20], [40, 40, 1, 1, 1], [0] * G])
  lm = tabular.lm(3, 11)
  table = lm.init(jax.random.key(5))
  counted = watched(lm)
  sample = lambda lm: run(lm, table, budgets=budgets)
  out, rows = counted(sample)
  # 7 rows of 15 are unfinished after the first token, 3 after token 20, and 1
  # after token 40; batches have 15, 8, 4 or 2 rows.
  assert rows == [8] * 19 + [4] * 20 + [2] * 10
  assert_same(out, sample(single_loop(lm)))
  whole, rows = counted(sample, map_rows=None)
  assert_same(whole, out)
  assert rows == [15] * 49
  # No loop runs once all rows are done, and short rollouts do not shrink.
  monkeypatch.setattr(compaction, "TOKENS", 50)
  few = jnp.minimum(budgets, 5)
  _, rows = counted(lambda lm: run(lm, table, budgets=few))
  assert rows == [15] * 4


@pytest.mark.parametrize(
  "sizes, shape, expected",
  [
    ((4, 1, 1, 1), (8, 1), 4),
    ((2, 2, 1, 2), (8, 1), 4),
    ((4, 2, 1, 1), (8, 1), 8),
    ((2, 4, 1, 1), (2, 4), None),  # groups are cut
    ((1, 1, 1, 4), (8, 4), 1),
  ],
)
def test_rows_stay_on_their_devices(sizes, shape, expected):
  mesh = jax.sharding.AbstractMesh(
    sizes, meshes.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4
  )
  with jax.sharding.use_abstract_mesh(mesh):
    assert compaction._parts(*shape) == expected


def test_rows_are_taken_of_each_part():
  done = jnp.asarray([[1, 1], [0, 1], [0, 1], [1, 1]], bool)
  order = compaction.unfinished_first(done, 2, 1)
  x = jnp.arange(8).reshape(4, 2)
  few = compaction.take(x, order)
  np.testing.assert_array_equal(few, [[2], [4]])
  new = compaction.put(-few, x, order)
  np.testing.assert_array_equal(new, [[0, 1], [-2, 3], [-4, 5], [6, 7]])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.int32])
def test_experts_are_unpacked_as_packed(dtype):
  experts = jnp.arange(2 * 3 * 4 * 5, dtype=dtype).reshape(2, 3, 4, 5)
  prefix = Prefix(None, None, None, experts[:, 0])
  unpacked = experts_lib.unpack(experts_lib.pack(experts), prefix)
  np.testing.assert_array_equal(unpacked, experts)


@pytest.mark.slow
def test_a_token_copies_neither_cache_nor_weights(monkeypatch):
  """The compiled loop copies only small arrays."""
  monkeypatch.setattr(compaction, "BETWEEN_CHECKS", 1)
  lm = transformer(TransformerConfig(layers=2, **SHAPE))
  params = jax.eval_shape(lm.init, jax.random.key(0))

  options = {"group_size": G, "max_new_tokens": 65, "eos_ids": (12,)}
  lm = single_loop(lm)
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
