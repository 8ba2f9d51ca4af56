"""Helpers for tests of whole runs and of other processes."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

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


def free_port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]
