"""Seconds from costs by hand, and the table of chips."""

import os

import jax
import jax.numpy as jnp
import pytest

from grpojax.aot import cost as cost_lib
from grpojax.aot import hlo, roofline, topology
from grpojax.aot.chips import CHIPS, Chip
from grpojax.aot.collectives import Collective
from grpojax.aot.cost import Cost, InstructionCost

ROUND = Chip(1000.0, 100, 10.0, 2.0, "round numbers")


def instruction(flops, bytes, trips, token_loop=False, sent=(), cycles=0):
  return InstructionCost("i", "", flops, bytes, cycles, trips, token_loop, sent)


def collective(kind, bytes, trips=1, n=4):
  return Collective(kind, bytes, trips, n)


HOP = roofline.HOP_SECONDS


def test_estimate_by_xla_cycles():
  sent = (collective("all-gather", 6),)
  instructions = (
    instruction(4000, 0, 2, cycles=70),  # 7 s, twice
    instruction(0, 10, 1, sent=sent),  # no cycles: 1 s, and 3 s sending
  )
  chip = ROUND._replace(clock=10.0)
  counted = roofline.estimate(Cost(instructions), chip)
  assert counted.xla_seconds == pytest.approx(14 + 1 + 3 + 3 * HOP)
  assert counted.untimed_seconds == pytest.approx(1)
  instructions = (
    instruction(0, 0, 3, cycles=40),  # 2 s on both cores, three times
    # 8 s of products at the peak, so 90 cycles count both cores already.
    instruction(8000, 0, 1, cycles=90),
    instruction(1000, 0, 1, cycles=60),  # 1 s of products: 3 s on both
  )
  chip = chip._replace(cores=2)
  counted = roofline.estimate(Cost(instructions), chip)
  assert counted.xla_seconds == pytest.approx(6 + 9 + 3)


def test_roofline_by_hand():
  sent = (collective("all-gather", 6, trips=5),)
  instructions = (
    instruction(4000, 10, 1),  # 4 s of products, 1 s of memory
    instruction(1000, 30, 2),  # 1 s and 3 s, twice
    instruction(0, 20, 5, True, sent),  # 2 s, and 3 s and 3 hops, 5 times
  )
  counted = roofline.estimate(Cost(instructions), ROUND)
  assert counted.seconds == pytest.approx(20 + 5 * (3 + 3 * HOP))
  assert counted.token_loop_seconds == pytest.approx(10 + 5 * (3 + 3 * HOP))
  assert counted.xla_seconds is None


# Published milliseconds of an output head with its loss (tokens, width, words):
# openxla/tokamax, tokamax/data/autotuning, tpu_v5 and tpu_v6_lite,
# linear_softmax_cross_entropy_loss.json, bfloat16, mean.
TIMED = {
  "v5p:1x1x1": {
    (1024, 2560, 262144): 3.64,
    (4096, 2560, 262144): 14.18,
    (8192, 7168, 128256): 39.37,
  },
  "v6e:1x1": {
    (1024, 4096, 151936): 2.142,
    (16384, 4096, 151936): 39.5,
    (8192, 7168, 128256): 25.15,
  },
}


@pytest.fixture
def optimizations():
  """Enables XLA's optimisations, which most tests switch off."""
  name = "jax_disable_most_optimizations"
  jax.config.update(name, False)
  yield
  jax.config.update(name, os.environ[name.upper()] == "True")  # conftest.py's


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMED)
def test_published_times_lie_between_the_estimates(name, optimizations):
  pytest.importorskip("libtpu")
  chip, (device, *_) = topology.machine(name)[1:]
  sharding = jax.sharding.SingleDeviceSharding(device)

  def loss(x, labels, head):
    logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own)

  def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  for (tokens, width, words), milliseconds in TIMED[name].items():
    labels = array(tokens, dtype=jnp.int32)
    args = array(tokens, width), labels, array(width, words)
    text = jax.jit(loss).lower(*args).compile().as_text()
    cost = cost_lib.cost(hlo.parse(text), token_loop_trips=1)
    counted = roofline.estimate(cost, chip)
    assert counted.seconds < 1e-3 * milliseconds < 1.05 * counted.xla_seconds
    assert counted.xla_seconds < 1.85 * counted.seconds


@pytest.mark.parametrize(
  "kind, sent, hops",
  [
    ("all-gather", 12, 3),
    ("reduce-scatter", 12, 3),
    ("all-reduce", 12, 6),
    ("all-to-all", 12 * 5 / 3, 3),
    ("collective-permute", 12, 1),
  ],
)
def test_seconds_of_collectives(kind, sent, hops):
  seconds = roofline.collective_seconds(collective(kind, 12), ROUND)
  assert seconds == pytest.approx(sent / 2 + hops * roofline.HOP_SECONDS)
  alone = collective(kind, 0, n=1)
  assert roofline.collective_seconds(alone, ROUND) == 0
  # Scaling book, part 3, pop quiz 2: bf16[2048, 8192] over 4 of v5e, 560 us.
  sent = collective("all-gather", 2048 * 8192 * 2 * 3 // 4)
  seconds = roofline.collective_seconds(sent, CHIPS["v5e"])
  assert seconds == pytest.approx(560e-6, rel=0.02)


@pytest.mark.parametrize("name", CHIPS)
def test_chip_table(name):
  chip = CHIPS[name]
  assert chip.source
  if chip.clock:  # operations per cycle of whole matrix units
    units = chip.flops / (chip.clock * chip.cores) / (2 * 128**2)
    assert units == pytest.approx(16 if name == "v6e" else 4, rel=0.01)
  if name == "cpu":
    return
  # Operations per HBM byte at balance: 195 (H200) to 625 (v6e).
  assert 150 < chip.flops / chip.hbm_bandwidth < 700
  assert chip.link_bandwidth < chip.hbm_bandwidth / 5
