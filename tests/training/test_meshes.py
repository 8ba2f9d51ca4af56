"""Runs on meshes of eight CPU devices equal runs on one device."""

import json
import pathlib

import pytest
from run_helpers import output_of

PROGRAM = pathlib.Path(__file__).with_name("mesh_runs.py")
MESHES = [
  {"mesh.data": 8},
  {"mesh.fsdp": 8},
  {"mesh.fsdp": 4, "mesh.tensor": 2},
  {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
]
ALL_ELSE = {
  "lora.rank": 2,
  "filter_groups.enable": True,
  "filter_groups.gen_parts": 2,
  "reward.functions": (f"{PROGRAM}:rare",),
}
CASES = {
  "dense": ("llama", {}, MESHES),
  # 101 tokens, untied, and 2 kv heads under tensor = 4
  "sizes not divisible by tensor": (
    "untied",
    {"loss.kl": "exact"},
    [MESHES[2], {"mesh.fsdp": 2, "mesh.tensor": 4}],
  ),
  "experts": (
    "experts",
    {"loss.router_aux_coef": 0.1, "loss.router_replay": True},
    MESHES[2:],
  ),
  # The next step is sampled on the same devices or on separate ones.
  "ahead": (
    "llama",
    {"sampling.ahead": 1},
    [
      MESHES[2],
      {"mesh.fsdp": 4, "mesh.sampling_devices": 4},
      {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.sampling_devices": 4},
    ],
  ),
  # Adapters, local layers, resampling, separate sampling mesh and memory.
  "all else": (
    "gemma",
    ALL_ELSE,
    [
      {"mesh.fsdp": 8, "model.reference": "host"},
      MESHES[2] | {"mesh.sampling_tensor": 1},
      {"mesh.fsdp": 8, "mesh.sampling_tensor": 4},
    ],
  ),
}


def on_eight_devices(*arguments):
  return output_of(PROGRAM, *arguments, JAX_NUM_CPU_DEVICES="8")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["quick", "bfloat16"])
def test_a_step_on_a_mesh_equals_one_device(program):
  """Samples on another mesh, reference log-probabilities, and gradient."""
  on_eight_devices(program)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    pytest.param(x, marks=() if x == "all else" else pytest.mark.long)
    for x in CASES
  ],
)
def test_runs_on_meshes_equal_one_device(case):
  printed = on_eight_devices("runs", json.dumps([CASES[case]]))
  assert printed.count("equal: ") == len(CASES[case][2])
