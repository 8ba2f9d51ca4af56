"""Runs programs of these tests in separate processes."""

import json
import pathlib

from run_helpers import output_of

# Eight CPU devices, and answers for libtpu, which would query the machine.
ENVIRONMENT = {
  "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def run(*words, **environment):
  """Returns the standard output of Python with these words."""
  return output_of(*words, **ENVIRONMENT | environment)


def compiled(program, *words, chips=4):
  """Reads the JSON printed by a program here, with XLA's optimisations."""
  file = pathlib.Path(__file__).with_name(program)
  environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
  environment["TPU_ACCELERATOR_TYPE"] = f"v5litepod-{chips}"
  return json.loads(run(file, *words, **environment))
