"""Runs programs of these tests in separate processes."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Eight CPU devices, and answers for libtpu, which would query the machine.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "PYTHONPATH": str(ROOT),
}


def run(*words, **environment):
  """Returns the standard output of Python with these words."""
  done = subprocess.run(
    [sys.executable, *map(str, words)],
    env=os.environ | ENVIRONMENT | environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def compiled(program, *words, chips=4):
  """Reads the JSON printed by a program here, with XLA's optimisations."""
  file = pathlib.Path(__file__).with_name(program)
  environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
  environment["TPU_ACCELERATOR_TYPE"] = f"v5litepod-{chips}"
  return json.loads(run(file, *words, **environment))
