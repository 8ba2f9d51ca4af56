"""A vocabulary that is cut over devices is sampled from without gathering."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("sharded_sampling.py")
EIGHT = "--xla_force_host_platform_device_count=8"
ENVIRONMENT = {
  "cpu": {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}"},
  "tpu": {
    "XLA_FLAGS": "",  # libtpu does not know the CPU's.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  },
}


@pytest.mark.parametrize(
  "platform", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)]
)
def test_no_logits_are_exchanged(platform):
  if platform == "tpu" and not importlib.util.find_spec("libtpu"):
    pytest.skip("needs libtpu")
  shared = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROGRAM.parents[2])}
  result = subprocess.run(
    [sys.executable, PROGRAM, platform],
    env=os.environ | shared | ENVIRONMENT[platform],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr
