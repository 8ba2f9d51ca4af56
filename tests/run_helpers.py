"""Helpers for tests of whole runs and of other processes."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from grpojax.models import huggingface as hf
from grpojax.runtime.files import records

ROOT = pathlib.Path(__file__).resolve().parents[1]


def start(code, *words, **environment):
  """Starts a Python program that may import grpojax and test helpers."""
  return subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(code), *words],
    env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"} | environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def rows_of(run, name="reward_mean"):
  """Rows of metrics.jsonl with a metric, by default rows of steps."""
  rows = records.read_jsonl(run / "metrics.jsonl")
  return [row for row in rows if name in row]


def untimed(rows):
  """Rows without times."""
  timed = lambda name: "second" in name or "wall" in name
  return [{k: v for k, v in row.items() if not timed(k)} for row in rows]


def refusal(program, *argv):
  """The error message of a program that does not start."""
  with pytest.raises(SystemExit) as caught:
    program.main([*argv])
  message = caught.value.code
  assert isinstance(message, str) and message.startswith("error: ")
  return message


def assert_same_weights(one, other):
  """Compares the parameters of two model directories bit by bit."""
  one, other = map(hf.load_params, (one, other))
  jax.tree.map(np.testing.assert_array_equal, one, other)


def environment(**changes):
  """Variables for a process that imports this checkout and uses CPUs."""
  own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
  return os.environ | own | changes


def python(*words, cwd=None, **changes):
  """Runs Python to its end, with changed variables; its output is text."""
  return subprocess.run(
    [sys.executable, *map(str, words)],
    env=environment(**changes),
    cwd=cwd,
    capture_output=True,
    text=True,
  )


def output_of(*words, **changes):
  """The output of a Python program that ends without an error."""
  done = python(*words, **changes)
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


def free_port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def joined(count):
  """The flags of each of several processes of a program, if several."""
  shared = [
    f"--coordinator=127.0.0.1:{free_port()}",
    f"--num_processes={count}",
  ]
  several = [[*shared, f"--process_id={i}"] for i in range(count)]
  return several if count > 1 else [[]]
