"""Costs of compiled programs against counts by hand.

Compiled for eight virtual CPU devices and, with libtpu, for TPU slices.
"""

import importlib.util

import processes
import pytest

from grpojax.aot import cost, hlo
from grpojax.aot.collectives import Collective

ITEMSIZE = {"cpu": 4, "v5e:2x2": 2, "v6e:2x2": 2}  # float32, bfloat16
TPUS = ("v5e:2x2", "v6e:2x2")
TOKENS = 64
HAS_TPU = importlib.util.find_spec("libtpu") is not None


@pytest.fixture(scope="module")
def quick():
  return processes.compiled("programs.py", "cpu")


@pytest.fixture(scope="module")
def everything():
  platforms = ("cpu", *TPUS) if HAS_TPU else ("cpu",)
  return processes.compiled("programs.py", "--all", *platforms)


@pytest.fixture(
  params=["cpu", *(pytest.param(x, marks=pytest.mark.slow) for x in TPUS)]
)
def platform(request):
  if request.param != "cpu" and not HAS_TPU:
    pytest.skip("libtpu is not installed")
  return request.param


@pytest.fixture
def costs(request, platform):
  """`(program, tokens) -> Cost` on a platform."""
  name = "quick" if platform == "cpu" else "everything"

  def costs(program, tokens=TOKENS, source=name):
    text = request.getfixturevalue(source)[platform][program]
    return cost.cost(hlo.parse(text), tokens)

  return costs


# x [256, 512] times w [512, 1024]; each of 4 devices computes a quarter.
SHARDED_FLOPS = 2 * 256 * 512 * 1024 // 4


def test_all_gather_of_a_matrix(costs, platform):
  counted = costs("all-gather")
  size = ITEMSIZE[platform]
  assert counted.flops == SHARDED_FLOPS
  sent = 512 * 1024 * size * 3 // 4  # w except the own quarter
  assert counted.collectives == (Collective("all-gather", sent, 1, 4),)
  x, w, out = (n * size for n in (64 * 512, 128 * 1024, 64 * 1024))
  # TPUs gather into VMEM; CPUs gather into main memory and read from there.
  passed = 0 if platform != "cpu" else 2 * 4 * w
  assert counted.bytes == x + w + passed + out


@pytest.mark.parametrize("name", ["reduce-scatter", "all-reduce"])
def test_reduction_of_partial_sums(costs, platform, name):
  counted = costs(name)
  assert counted.flops == SHARDED_FLOPS
  # XLA:CPU reduces and then slices; XLA:TPU fuses both.
  kind = "all-reduce" if platform == "cpu" else name
  sent = 256 * 1024 * ITEMSIZE[platform] * 3 // 4
  sent *= 2 if kind == "all-reduce" else 1
  assert counted.collectives == (Collective(kind, sent, 1, 4),)


def test_token_loop_with_an_inner_scan(costs, platform):
  counted = costs("decode")
  size = ITEMSIZE[platform]
  weights = (6 * 1024 * 1024 + 1024 * 2048) // 4  # of one of 4 devices
  assert counted.flops == TOKENS * 2 * 8 * weights
  assert counted.in_token_loop.flops == counted.flops
  # The loop's counter bounds its trips.
  assert costs("decode", 0).flops == counted.flops
  if platform != "cpu":  # XLA:CPU copies a layer's slice before use
    assert counted.bytes == pytest.approx(TOKENS * weights * 2, rel=1e-3)
  layer = 8 * 1024 * size * 3 // 4
  head = 8 * 2048 * size * 3 // 4
  kinds = {
    "reduce-scatter": {"bytes": TOKENS * 6 * layer, "runs": TOKENS * 6},
    "all-reduce": {"bytes": 2 * TOKENS * head, "runs": TOKENS},
  }
  if platform == "cpu":
    sent = 2 * TOKENS * (6 * layer + head)
    kinds = {"all-reduce": {"bytes": sent, "runs": TOKENS * 7}}
  assert cost.by_kind(counted) == kinds
  assert counted.in_token_loop.collectives == counted.collectives
  assert counted.collective_bytes == sum(k["bytes"] for k in kinds.values())


def test_cache_is_updated_in_place(costs, platform):
  counted = costs("cache")
  slot = 4 * 1024 * ITEMSIZE[platform]
  # 16 writes of a slot; the new slot is read in each on CPU, once on TPU.
  moved = 16 * 2 * slot if platform == "cpu" else (16 + 1) * slot
  assert counted.bytes == pytest.approx(moved, abs=1000)


def test_costs_of_kernels(costs, platform):
  if platform == "cpu":
    pytest.skip("the kernels are for TPUs")
  # On average, rows read half of a layer's slots and half a block of 128.
  counted = costs("decode attention")
  token = [i for i in counted.instructions if i.trips == 16]
  slots = 16 * 32 * (1024 + 128) // 2
  moved = slots * 2 * 128 * 2  # keys and values of two heads
  # The rest is queries and outputs; the cache is not copied.
  assert 1 <= sum(i.bytes for i in token) / moved < 1.1
  # Two heads share lanes, so eight queries multiply 128 channels.
  assert sum(i.flops for i in token) == 2 * slots * 2 * 8 * 128
  # Attention has two products forward, three for queries and four for keys;
  # half of a row's own keys are in the future.
  pairs = (600 * 256 * 64) * (256 + 256 // 2)
  assert costs("attention").flops == 2 * (2 + 3 + 4) * pairs


def test_ragged_dot(costs, platform):
  counted = costs("ragged dot")
  # Each row meets a single of 8 matrices; XLA:CPU masks a dense product.
  masked = 8 if platform == "cpu" else 1
  assert counted.flops == 2 * 256 * 512 * 256 * masked
  if platform != "cpu":
    moved = 2 * (256 * 512 + 8 * 512 * 256 + 256 * 256)
    assert counted.bytes == pytest.approx(moved, rel=1e-3)
    # XLA's cycles are those of all rows with all matrices. Forward, and for the
    # matrices' gradient, which contracts the rows:
    counted = costs("ragged gradient")
    assert counted.flops == 2 * 2 * 256 * 512 * 256
    assert sum(i.cycles for i in counted.instructions if i.flops) == 0


@pytest.mark.slow
def test_flops_of_a_transformer(costs):
  """2 operations per parameter and token, plus attention.

  V 512, D 128, L 2, H 4, K 2, E 64, F 256; B 2, G 2, P 32, T 64.
  """
  layer = 128 * (4 + 2 + 2) * 64 + 4 * 64 * 128 + 3 * 128 * 256
  prompts = 2 * 32
  completions = 2 * 2 * 64
  products = 2 * 2 * layer * (prompts + completions)
  head = 2 * 128 * 512 * completions
  keys = prompts * 32 + completions * (32 + 64)  # pairs, none masked away
  attention = 2 * 2 * (2 * 4 * 64) * keys  # logits and values, L H E
  for name, times in (("forward", 1), ("gradient", 3)):
    counted = costs(name, source="everything")
    assert counted.flops == times * (products + head + attention)
