"""Programs for several devices, each in a process that has them."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

DIRECTORY = pathlib.Path(__file__).parent
TPU = {
  "XLA_FLAGS": "",  # libtpu does not know the CPU's.
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def run(program, *args, **environment):
  shared = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(DIRECTORY.parents[1])}
  done = subprocess.run(
    [sys.executable, DIRECTORY / program, *args],
    env=os.environ | shared | environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


@pytest.mark.parametrize(
  "platform, environment",
  [
    ("cpu", {"JAX_NUM_CPU_DEVICES": "8"}),
    pytest.param("tpu", TPU, marks=pytest.mark.slow),
  ],
)
def test_no_logits_are_exchanged(platform, environment):
  """A vocabulary that is cut over devices is sampled from without gathering."""
  if platform == "tpu" and not importlib.util.find_spec("libtpu"):
    pytest.skip("needs libtpu")
  run("sharded_sampling.py", platform, **environment)


@pytest.mark.slow
def test_packed_on_eight_devices_is_unpacked_on_one():
  """The same numbers, and nothing sent."""
  output = run("packed_on_mesh.py", JAX_NUM_CPU_DEVICES="8")
  assert output.count("equal:") == 2
