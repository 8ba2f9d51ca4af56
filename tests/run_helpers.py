"""Helpers for tests of whole runs."""

import socket

import pytest

from grpojax.runtime.files import records


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
