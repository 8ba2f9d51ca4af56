"""Programs for eight devices, each in a process that has them."""

import os
import pathlib
import subprocess
import sys

import pytest

DIRECTORY = pathlib.Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
  "program",
  [
    "sharded_sampling.py",
    pytest.param("environment_on_mesh.py", marks=pytest.mark.slow),
    pytest.param("packed_on_mesh.py", marks=pytest.mark.long),
  ],
)
def test_eight_devices_compute_what_one_does(program):
  """And send each other nothing that is large."""
  environment = {
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(DIRECTORY.parents[1]),
  }
  done = subprocess.run(
    [sys.executable, DIRECTORY / program],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-4000:]
