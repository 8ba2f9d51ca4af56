"""Costs of compiled programs, against counts by hand.

Compiled for eight virtual CPU devices and, where libtpu is installed, for TPU
slices that nobody has to have.
"""

import importlib.util
import pathlib
import sys

import pytest

from grpojax.aot import cost, hlo

sys.path.append(str(pathlib.Path(__file__).parent))
import processes  # noqa: E402

ITEMSIZE = {"cpu": 4, "v5e:2x2": 2, "v6e:2x2": 2}  # float32, bfloat16
TOKENS = 64
HAS_TPU = importlib.util.find_spec("libtpu") is not None


def compiled(*words):
  return processes.compiled(
    "programs.py",
    *words,
    JAX_DISABLE_MOST_OPTIMIZATIONS="0",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
  )


@pytest.fixture(scope="module")
def quick():
  return compiled("cpu")


@pytest.fixture(scope="module")
def everything():
  return compiled("--all", "cpu", *(["v5e:2x2", "v6e:2x2"] if HAS_TPU else []))


@pytest.fixture(
  params=[
    "cpu",
    pytest.param("v5e:2x2", marks=pytest.mark.slow),
    pytest.param("v6e:2x2", marks=pytest.mark.slow),
  ]
)
def platform(request):
  if request.param != "cpu" and not HAS_TPU:
    pytest.skip("libtpu is not installed")
  return request.param


@pytest.fixture
def programs(request, platform):
  name = "quick" if platform == "cpu" else "everything"
  return request.getfixturevalue(name)[platform]


def costs(programs, name, tokens=TOKENS):
  return cost.cost(hlo.parse(programs[name]["text"]), tokens)


@pytest.mark.slow
def test_a_scan_of_mlps(programs, platform):
  found = costs(programs, "mlp")
  # 4 layers of two products of [128, 256] and [256, 512], 2 operations each.
  assert found.flops == 4 * 2 * 2 * 128 * 256 * 512
  assert found.flops > 3 * programs["mlp"]["flops"]  # XLA counts one layer
  assert found.token_loops == ()
  if platform != "cpu":  # hidden states stay in VMEM
    weights, ends = 4 * 2 * 256 * 512 * 2, 2 * 128 * 256 * 2
    assert found.bytes == pytest.approx(weights + ends, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, flops",
  [
    ("batch dot", 2 * (2 * 4 * 128 * 256) * 64),
    # [b=2, g=4, h=2, r=4] of products of [1, 64] and [64, 256].
    ("grouped dot", 2 * (2 * 4 * 2 * 4 * 256) * 64),
  ],
)
def test_batch_dimensions(programs, name, flops):
  found = costs(programs, name)
  assert found.flops == flops == programs[name]["flops"]


# x [256, 512] times w [512, 1024] on 4 devices, cut in one place or another:
# a device does a quarter of it.
SHARDED_FLOPS = 2 * 256 * 512 * 1024 // 4


def test_a_matrix_gathered(programs, platform):
  found, size = costs(programs, "all-gather"), ITEMSIZE[platform]
  assert found.flops == SHARDED_FLOPS == programs["all-gather"]["flops"]
  (c,) = found.collectives
  assert (c.kind, c.group_size, c.trips) == ("all-gather", 4, 1)
  assert c.bytes == 512 * 1024 * size * 3 // 4  # all of w but its own quarter
  assert not c.in_token_loop
  x, w, out = (n * size for n in (64 * 512, 128 * 1024, 64 * 1024))
  # Gathered into VMEM on TPU, into main memory and read from there on CPU.
  passed = 0 if platform != "cpu" else 2 * 4 * w
  assert found.bytes == x + w + passed + out


@pytest.mark.parametrize("name", ["reduce-scatter", "all-reduce"])
def test_partial_sums_added(programs, platform, name):
  found, out = costs(programs, name), 256 * 1024 * ITEMSIZE[platform]
  assert found.flops == SHARDED_FLOPS
  (c,) = found.collectives
  # XLA:CPU adds all and takes a part; XLA:TPU fuses the two.
  kind = "all-reduce" if platform == "cpu" else name
  assert (c.kind, c.group_size) == (kind, 4)
  assert c.bytes == out * 3 // 4 * (2 if kind == "all-reduce" else 1)
  assert c.op_name.endswith("dot_general")


def test_a_token_loop_with_a_scan_inside(programs, platform):
  found = costs(programs, "decode")
  assert found.token_loops == ("jit(decode)/while",)
  weights = (6 * 1024 * 1024 + 1024 * 2048) // 4  # of one of 4 devices
  assert found.flops == TOKENS * 2 * 8 * weights
  assert found.in_token_loop.flops == found.flops
  # Its own counter says how often it runs at the most.
  assert costs(programs, "decode", 0).flops == found.flops
  if platform != "cpu":  # XLA:CPU copies a layer's slice before it is used
    assert found.bytes == pytest.approx(TOKENS * weights * 2, rel=1e-3)


def test_weights_are_read_once_a_token(programs, platform):
  found = costs(programs, "unrolled decode")
  weights = (3 * 1024 * 1024 + 1024 * 2048) * ITEMSIZE[platform]
  # Beside 5 matrices with 1024 rows, 8 rows of activations pass by.
  assert 1 <= found.in_token_loop.bytes / (TOKENS * weights) < 1.04
  large = [i for i in found.instructions if i.bytes > 1024 * 1024]
  assert sum(i.bytes * i.trips for i in large) > 0.9 * found.bytes
  assert all(i.trips == TOKENS for i in large)


def test_collectives_in_the_token_loop(programs, platform):
  found = costs(programs, "decode")
  kinds = cost.by_kind(found)
  size = ITEMSIZE[platform]
  layer, head = 8 * 1024 * size * 3 // 4, 8 * 2048 * size * 3 // 4
  if platform == "cpu":
    runs = TOKENS * 6 + TOKENS
    sent = 2 * TOKENS * (6 * layer + head)
    assert kinds == {"all-reduce": {"bytes": sent, "runs": runs}}
  else:
    assert kinds == {
      "reduce-scatter": {"bytes": TOKENS * 6 * layer, "runs": TOKENS * 6},
      "all-reduce": {"bytes": 2 * TOKENS * head, "runs": TOKENS},
    }
  assert all(c.in_token_loop for c in found.collectives)
  assert found.collective_bytes == sum(k["bytes"] for k in kinds.values())


def test_a_cache_updated_in_place(programs, platform):
  found, slot = costs(programs, "cache"), 4 * 1024 * ITEMSIZE[platform]
  # 16 writes of a slot; its content is read each time on CPU, once on TPU.
  moved = 16 * 2 * slot if platform == "cpu" else (16 + 1) * slot
  assert found.bytes == pytest.approx(moved, abs=1000)


def test_a_decoding_cache_is_read_once_and_one_tile_written(programs, platform):
  if platform == "cpu":
    pytest.skip("the kernel is for TPUs")
  found = costs(programs, "decoding cache")
  rows, width = 2 * 16 * 32, 2 * 128  # keys and values
  token = sum(i.bytes for i in found.instructions if i.trips == 16)
  read, tile = rows * width * 1024 * 2, rows * width * 16 * 2
  assert token == pytest.approx(read + 2 * tile, rel=0.02)


def test_attention_by_kernels_costs_its_products(programs, platform):
  if platform == "cpu":
    pytest.skip("the kernel is for TPUs")
  found = costs(programs, "attention")
  # Two products forward, three for queries and four for keys; of a row's own
  # keys, half are in the future.
  assert found.flops == 2 * (2 + 3 + 4) * (600 * 256 * 64) * (256 + 256 // 2)


def test_a_kernel_costs_what_it_says():
  estimate = '{"flops":"60","transcendentals":"7","bytes_accessed":"40"}'
  text = f"""HloModule kernel
ENTRY %main (x: f32[1000]) -> f32[8] {{
  %x = f32[1000]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"cost_estimate":{estimate}}}}}
}}
"""
  found = cost.cost(hlo.parse(text), TOKENS)
  assert (found.flops, found.bytes) == (60, 40)


def test_a_ragged_dot(programs, platform):
  found = costs(programs, "ragged dot")
  # Each row meets one of 8 matrices; without such a product, XLA:CPU masks.
  masked = 8 if platform == "cpu" else 1
  assert found.flops == 2 * 256 * 512 * 256 * masked
  if platform != "cpu":
    moved = 2 * (256 * 512 + 8 * 512 * 256 + 256 * 256)
    assert found.bytes == pytest.approx(moved, rel=1e-3)


def transformer_flops():
  """Of programs.py's loss: 2 a parameter and token, and attention.

  V 512, D 128, L 2, H 4, K 2, E 64, F 256; B 2, G 2, P 32, T 64.
  """
  layer = 128 * (4 + 2 + 2) * 64 + 4 * 64 * 128 + 3 * 128 * 256
  prompts, completions = 2 * 32, 2 * 2 * 64
  products = 2 * 2 * layer * (prompts + completions)
  head = 2 * 128 * 512 * completions
  keys = prompts * 32 + completions * (32 + 64)  # pairs, none masked away
  attention = 2 * 2 * (2 * 4 * 64) * keys  # logits and values, L H E
  return products + head + attention


def test_the_transformer_forward(programs, platform):
  if platform == "cpu":
    pytest.skip("among the slow ones")
  assert costs(programs, "forward").flops == transformer_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name, times", [("forward", 1), ("gradient", 3)])
def test_the_transformer(everything, platform, name, times):
  found = costs(everything[platform], name)
  assert found.flops == times * transformer_flops()
