"""Experts that are cut over eight devices, in a process of its own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("sharded_experts.py")
EIGHT = "--xla_force_host_platform_device_count=8"
CPU = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}"}
TPU = {
  "XLA_FLAGS": "",  # libtpu does not know the CPU's.
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # they are what is read
}


def run(environment, *checks):
  shared = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROGRAM.parents[2])}
  result = subprocess.run(
    [sys.executable, PROGRAM, *checks],
    env=os.environ | shared | environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_results_and_exchanges():
  run(CPU)


@pytest.mark.long
def test_whole_models():
  run(CPU, "models")


@pytest.mark.slow
def test_compiled_for_tpu():
  if not importlib.util.find_spec("libtpu"):
    pytest.skip("needs libtpu")
  run(TPU, "tpu")
