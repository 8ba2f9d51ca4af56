"""Communication in the rollout and update, compiled for TPUs."""

import json

import processes
import pytest

from grpojax.aot import cost, hlo
from grpojax.core.decoding import BETWEEN_CHECKS

pytestmark = pytest.mark.slow  # compiles whole programs
# mesh_programs.py's model: V, D, H E, K E, F; T.
V = 4096
D = 512
Q = 512
K = 256
F = 1024
T = 256
MATRICES = 2 * D * Q + 2 * D * K + 3 * D * F  # numbers in a layer
ROWS = 32 * 8
LAYERS = 9  # enough to be scanned
ITEMSIZE = 2  # of bfloat16


def compiled(*names):
  pytest.importorskip("libtpu")
  words = ("v5e:2x4", LAYERS, *names)
  return processes.compiled("mesh_programs.py", *words, chips=8)


@pytest.fixture(scope="module")
def rollouts():
  kinds = ("", " tensor", " sampling_tensor", " int8")
  return compiled(*(f"rollout{kind}" for kind in kinds))


@pytest.fixture(scope="module")
def updates():
  return compiled("update")


def modules(programs, name):
  """Instructions of a program by name, and its costs."""
  module = hlo.parse(programs[name]["text"])
  instructions = {}
  for computation in module.computations.values():
    instructions |= computation.instructions
  return instructions, cost.cost(module, T)


def before_token_loop(counted):
  """Bytes that are sent before the token loop."""
  return counted.collective_bytes - counted.in_token_loop.collective_bytes


def test_update_gathers_layers_and_scatters_gradients(updates):
  """Matrices are sent twice, their gradients once, activations never."""
  instructions, counted = modules(updates, "update")
  computations = hlo.parse(updates["update"]["text"]).computations
  matrices = MATRICES * ITEMSIZE
  table = V * D * 7 // 8
  layers = [i for i in counted.instructions if i.trips == LAYERS]
  inside = [c for i in layers for c in i.collectives if c.bytes > 1e5]
  gathered = sum(c.bytes for c in inside if c.kind == "all-gather")
  assert gathered == 2 * matrices * 7 // 8
  # Most overlap with products; a barrier would prevent this. Fusions that share
  # a chain_id have a part of a collective and a product.
  overlapping = 0
  for i in layers:
    called = [computations[name] for _, name in instructions[i.name].called]
    fused = (x.attributes for c in called for x in c.instructions.values())
    starts = instructions[i.name].opcode.endswith("-start")
    if starts or any("chain_id" in x for x in fused):
      overlapping += sum(c.bytes for c in i.collectives)
  assert overlapping > gathered * 3 / 4
  reduced = [c for c in inside if "reduce" in c.kind]
  assert {c.kind for c in inside} <= {*[c.kind for c in reduced], "all-gather"}
  # Outside of the layers only the embedding and the tied head are as large,
  # each gathered, with a scattered gradient; lookup and sums are in float32.
  outer = [c for c in counted.collectives if c not in inside and c.bytes > 1e5]
  assert {c.kind for c in reduced} == {"reduce-scatter"}
  assert sum(c.bytes for c in reduced) == matrices * 7 // 8
  assert sorted((c.kind, c.bytes) for c in outer) == [
    ("all-gather", 2 * table),
    ("all-gather", 4 * table),
    ("reduce-scatter", 2 * table),
    ("reduce-scatter", 4 * table),
  ]


def test_arguments_are_split_over_devices(updates):
  """A device holds an eighth of parameters, moments and batch."""
  weights = LAYERS * MATRICES + V * D
  layers = -(-LAYERS // 8) * 8  # a TPU's tile has eight rows
  norms = (2 * layers + 1) * D
  state = 3 * 4 * (weights // 8 + norms)
  batch = ROWS * T * (4 + 1 + 4) // 8
  extra = updates["update"]["arguments"] - state - batch
  assert 0 <= extra < 2e4  # prompts, advantages, counts, padding


def test_decoding_only_communicates_the_stop_check(rollouts):
  """The check has a few bytes."""
  _, counted = modules(rollouts, "rollout")
  (end,) = counted.in_token_loop.collectives
  assert end.trips == -(-(T - 1) // BETWEEN_CHECKS) and end.bytes < 8
  # Before the loop parameters are gathered once.
  weights = LAYERS * MATRICES + V * D
  before = before_token_loop(counted)
  assert before <= (weights + V * D) * 4 * 3 / 4 + 100


def test_int8_weights_are_gathered_and_read_in_int8(rollouts):
  instructions, counted = modules(rollouts, "rollout int8")
  gathered = before_token_loop(counted)
  weights = LAYERS * MATRICES + V * D  # and scales; the embedding in float32
  assert gathered <= (1.02 * weights + 4 * V * D) * 3 / 4
  # Products convert, so no array is a bfloat16 copy of a layer or of all.
  cache = ROWS // 8 * K * T // 2  # keys or values of a layer, in a stage
  sizes = {D * Q, D * K, D * F, V * D, cache}
  dtypes = {
    s.dtype
    for i in counted.in_token_loop.instructions
    for s in instructions[i.name].shapes
    if {s.elements, s.elements // LAYERS} & sizes
  }
  assert "s8" in dtypes and "bf16" not in dtypes
  # Small scales, too, stay in HBM: VMEM would be filled for each layer.
  (kernel,) = (
    i
    for i in instructions.values()
    if i.opcode == "custom-call" and "decode_attention" in i.op_name
  )
  caches = [s.memory_space for s in kernel.shapes if s.dims[0] == LAYERS]
  assert caches == [0] * 4  # keys, values, and their scales


@pytest.mark.parametrize(
  "program", ["rollout tensor", "rollout sampling_tensor"]
)
def test_split_weights_need_two_reductions_per_layer(rollouts, program):
  instructions, counted = modules(rollouts, program)
  rows = ROWS // 4  # per device; 2 devices share each weight
  runs = {}
  inside = counted.in_token_loop.instructions
  for name, c in ((i.name, c) for i in inside for c in i.collectives):
    assert c.group_size in (2, 4, 8), c
    kind = c.kind, max(s.elements for s in instructions[name].shapes)
    runs[kind] = runs.get(kind, 0) + c.trips
    if kind[1] == rows * D:
      assert c.bytes == rows * D * (4 if c.trips <= T else ITEMSIZE)
  # Two per layer in 16 bits, and the embedding's.
  assert runs.pop(("all-reduce", rows * D)) == T * (2 * LAYERS + 1)
  # Sampling sends a token and a sum of each part of the vocabulary.
  assert all(elements <= 64 * rows for _, elements in runs), runs
  # Logits stay in the kernel: in the token loop, only the head is as wide as
  # the vocabulary or a device's half of it.
  assert any("draw_parts" in i.op_name for i in inside)
  shapes = {s.dims for i in inside for s in instructions[i.name].shapes}
  shapes -= {(D, V // 2), (V // 2, D)}
  assert not [dims for dims in shapes if V in dims or V // 2 in dims]


def test_experts_are_read_once_per_token():
  """Decoding does not copy layers out of their stack."""
  program = compiled("rollout experts")
  _, counted = modules(program, "rollout experts")
  inside = counted.in_token_loop.instructions
  matrix = 64 * D * F * ITEMSIZE  # a layer has three of these
  least = 3 * LAYERS * matrix
  read = sum(
    i.bytes * i.trips
    for i in inside
    if "layer_product" in i.op_name or "dynamic_index" in i.op_name
  )
  assert least < read / (T - 1) < 1.1 * least
  # The parser does not see the kernel: nothing else handles a layer's matrices.
  kernels = "layer_product", "decode_attention"
  others = [i for i in inside if not any(x in i.op_name for x in kernels)]
  assert max(i.bytes for i in others if i.trips > T) < matrix / 4


TWO_MESHES = """
import sys
from grpojax.aot import programs, topology
from grpojax.training.config import default_config, from_config
from grpojax.training.run import setup
config = default_config()
config.model.path, config.optim.micro_batches = sys.argv[1], 1
config.batch_size, config.data.max_prompt_length = 32, 8
config.sampling.max_new_tokens = 4
config.mesh.fsdp, config.mesh.expert, config.mesh.tensor = 8, 4, 2
config.mesh.sampling_tensor = 4
devices = topology.machine("cpu:64").devices
settings = from_config(config)
run = programs.open_run(settings, setup.make_mesh(settings, devices))
compiled = programs.lower(run, "rollout").compile()
for name, place in vars(compiled.output_shardings).items():
  if place is not None:  # without turns
    print(name, *[x for x in place.spec if x])
"""


def test_rollout_stays_on_the_sampling_mesh(tmp_path):
  """XLA once confused the two meshes and split rows by 8 of 16."""
  config = {"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32}
  config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
  config |= {"num_key_value_heads": 4, "num_experts_per_tok": 2}
  config |= {"intermediate_size": 32, "moe_intermediate_size": 16}
  config |= {"num_experts": 4}
  (tmp_path / "model.json").write_text(json.dumps(config))
  out = processes.run("-c", TWO_MESHES, tmp_path / "model.json", XLA_FLAGS="")
  places = [line.split(" ", 1)[1] for line in out.splitlines()]
  assert places == ["('fsdp', 'expert')"] * 6
