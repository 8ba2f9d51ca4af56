"""Packed rows on eight devices: the same numbers, and nothing sent."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("packed_on_mesh.py")


@pytest.mark.slow
def test_packed_on_eight_devices_is_unpacked_on_one():
  devices = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, PROGRAM],
    env=os.environ | devices | {"PYTHONPATH": str(PROGRAM.parents[2])},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  assert done.stdout.count("equal:") == 2
