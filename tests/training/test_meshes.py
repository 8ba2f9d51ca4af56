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
  "experts": ("experts", {}, MESHES),
  "bfloat16": ("llama", {"model.dtype": "bfloat16"}, MESHES[-1:]),
}


def on_eight_devices(*cases):
  arguments = [json.dumps(cases)] if cases else []
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
def test_a_step_before_its_update():
  """Sampling on a mesh of its own, and the reference's pass after it."""
  on_eight_devices()


# The samples are the same, but the directions of the updates agree to a cosine
# of about .8 only, after one step too; it was above .9 before attention in
# blocks, joint passes and the new draw. Which of them it is is not known yet.
UNEXPLAINED = pytest.mark.xfail(reason="bfloat16 on a mesh: cosine below .9")


@pytest.mark.slow  # each case is several whole runs
@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=UNEXPLAINED if case == "bfloat16" else ())
    for case in CASES
  ],
)
def test_whole_runs(case):
  told = on_eight_devices(CASES[case])
  assert told.count("equal: ") == len(CASES[case][2])
