"""What a run samples and learns is the same on any mesh: eight CPU devices."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("mesh_runs.py")
MESHES = [
  {"mesh.data": 8},
  {"mesh.fsdp": 8},
  {"mesh.fsdp": 4, "mesh.tensor": 2},
  {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
]
CASES = {
  # Each axis of the mesh that cuts rows has to cut groups.
  "dense": ("llama", {}, MESHES),
  "sampling on another mesh": (
    "llama",
    {},
    [
      {"mesh.fsdp": 8, "mesh.sampling_tensor": 2},
      {"mesh.fsdp": 8, "mesh.sampling_tensor": 4},
      {"mesh.fsdp": 4, "mesh.tensor": 2, "mesh.sampling_tensor": 1},
    ],
  ),
  "the reference on the host": (
    "llama",
    {"model.reference": "host"},
    [{"mesh.data": 8, "model.reference": "device"}, {"mesh.fsdp": 8}],
  ),
  "adapters": ("llama", {"lora.rank": 2}, MESHES),
  "local and global layers": (
    "gemma",
    {"lora.rank": 2},
    [{"mesh.data": 8}, {"mesh.fsdp": 4, "mesh.tensor": 2}],
  ),
  # 101 tokens, untied, and 2 kv heads under tensor = 4
  "what tensor does not divide": (
    "untied",
    {},
    [{"mesh.fsdp": 4, "mesh.tensor": 2}, {"mesh.fsdp": 2, "mesh.tensor": 4}],
  ),
  "experts": ("experts", {"loss.router_aux_coef": 0.1}, MESHES),
  "fresh prompts": (
    "llama",
    {
      "filter_groups.enable": True,
      "filter_groups.gen_parts": 2,
      "reward.functions": (f"{PROGRAM}:rare",),
    },
    [{"mesh.fsdp": 4, "mesh.tensor": 2, "mesh.sampling_tensor": 1}],
  ),
}


def on_eight_devices(*arguments):
  env = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, PROGRAM, *arguments],
    env=os.environ | env | {"PYTHONPATH": str(PROGRAM.parents[2])},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["quick", "halves"])
def test_a_step(what):
  """Sampling on a mesh of its own, the reference after it, and the gradient."""
  on_eight_devices(what)


# By hand, for the others have most of it.
ALSO = (
  "sampling on another mesh",  # one step of it is in test_a_step
  "adapters",
  "the reference on the host",
  "fresh prompts",
  "local and global layers",
)


@pytest.mark.parametrize(  # each case is several whole runs
  "case",
  [
    pytest.param(
      case, marks=pytest.mark.long if case in ALSO else pytest.mark.slow
    )
    for case in CASES
  ],
)
def test_whole_runs(case):
  told = on_eight_devices("runs", json.dumps([CASES[case]]))
  assert told.count("equal: ") == len(CASES[case][2])
