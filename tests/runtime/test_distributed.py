"""Agreement and end of processes, with simulated other processes.

test_processes.py starts real processes.
"""

import json
import os
import signal
import socket
import types

import jax
import numpy as np
import pytest

from grpojax.runtime.processes import distributed, interrupts
from grpojax.training.step import scoring


@pytest.mark.parametrize(
  "blocks",
  [[[0, 1, 2, 3, 4]], [[0, 1, 2], [3, 4]], [[0, 1], [2, 3], [4], []]],
)
def test_rows_are_split_into_blocks(blocks, monkeypatch):
  count = len(blocks)
  monkeypatch.setattr(distributed, "count", lambda: count)
  rows = [list(range(5)[distributed.rows_of(i, 5)]) for i in range(count)]
  assert rows == blocks


@pytest.fixture
def client(monkeypatch):
  """`(**methods) -> None` replaces the client of JAX's coordination service."""

  def use(**methods):
    made = types.SimpleNamespace(**methods)
    monkeypatch.setattr(distributed, "_client", lambda: made)
    monkeypatch.setattr(jax, "process_index", lambda: 0)

  return use


@pytest.fixture
def speak_for(monkeypatch, client):
  """`(*values of other processes) -> messages sent by this process`."""

  def use(*others):
    monkeypatch.setattr(distributed, "count", lambda: len(others) + 1)
    sent = {}

    def get(key, milliseconds):
      process = int(key.rpartition("/")[2])
      return json.dumps(others[process - 1]).encode()

    client(
      key_value_set_bytes=sent.__setitem__,
      blocking_key_value_get_bytes=get,
      key_value_delete=lambda key: sent.pop(key, None),
    )
    module = distributed.multihost_utils
    monkeypatch.setattr(module, "process_allgather", lambda x: x)
    return sent

  return use


def test_a_wait_ends_with_the_other_process(client):
  def late(key, milliseconds):
    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")

  client(
    blocking_key_value_get_bytes=late,
    key_value_try_get=lambda key: "process 1: KeyError",
  )
  with pytest.raises(distributed.OtherGone, match="process 1") as gone:
    distributed._receive("words")
  assert distributed._caused_by_another(gone.value)


def test_values_of_all_processes(speak_for):
  sent = speak_for([[1.5, "é"]])
  for _ in range(3):
    mine, other = distributed.gather([float("nan")])
  assert np.isnan(mine[0]) and other == [[1.5, "é"]]
  assert len(sent) == 1  # earlier messages are deleted
  # Chunks of 3 and 2 prompts: 0 1 | 2 and 3 | 4.
  speak_for([2, 4])
  assert scoring.gather_rows([0, 1, 3], [3, 2]) == [0, 1, 2, 3, 4]


def test_errors_of_other_processes_are_raised(speak_for):
  speak_for("no such file", None)
  with pytest.raises(ValueError, match="process 1: no such file"):
    with distributed.agreed():
      pass
  with pytest.raises(KeyError):
    with distributed.agreed():
      raise KeyError("mine")


def test_differences_are_named(speak_for):
  speak_for({"config": "a\n  seed: 2\nb"})
  with pytest.raises(ValueError, match="0 and 1 differ in config: seed: 1 and"):
    distributed.check_same(config="a\n  seed: 1\nb")
  distributed.check_same(config="a\n  seed: 2\nb")


@pytest.mark.parametrize(
  "words, several",
  [
    ("SLURM_NTASKS=2 SLURM_PROCID=0", True),
    ("TPU_WORKER_HOSTNAMES=a.b,c.d", True),
    ("JAX_COORDINATOR_ADDRESS=a:1", True),
    ("", False),
    ("SLURM_NTASKS=2", False),  # in an allocation, but not under srun
    ("SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", False),
    ("TPU_WORKER_HOSTNAMES=localhost", False),
  ],
)
def test_environments_of_several_processes(words, several):
  environ = dict(word.split("=") for word in words.split())
  assert distributed._several(environ) == several
  warning = {"TPU_WORKER_HOSTNAMES": "WARNING: none found, please set it"}
  assert not distributed._several(warning)


@pytest.mark.parametrize(
  "words, message",
  [
    (("here",), "--coordinator=here --num_processes= .*: give HOST:PORT"),
    (("here:99999", "2", "0"), "give HOST:PORT of process 0"),
    (("here:1", "2", "2"), "--process_id=2: give .*a number from 0 to N-1"),
  ],
)
def test_invalid_arguments(words, message):
  with pytest.raises(ValueError, match=message):
    with distributed.joined(*words):
      pass


def test_ports_and_waits(monkeypatch, capsys):
  ends = []

  def end(code):  # also ends the wait, by SIGTERM
    ends.append(code)
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(interrupts, "end", end)
  monkeypatch.setattr(distributed, "PATIENCE", 0.5)
  monkeypatch.setattr(distributed, "SAY_AFTER", 0.2)
  server = socket.create_server(("127.0.0.1", 0))
  address = f"127.0.0.1:{server.getsockname()[1]}"
  with pytest.raises(ValueError, match="of --coordinator is not free"):
    with distributed.joined(address, "2", "0"):
      pass
  distributed._find_coordinator(address, 1, [])
  server.close()
  with pytest.raises(interrupts.Left, match="ended by SIGTERM"):
    with distributed.joined(address, "2", "1"):
      pass
  assert ends == [1]
  problem = f": process 0 is not at {address} (Connection refused)"
  assert capsys.readouterr().err.splitlines() == [
    f"waiting for the other processes of this run, 0.5 s at most{problem}",
    f"the other processes of this run did not come within 0.5 s{problem}",
    "start each process with the same --coordinator and --num_processes, and "
    "its own --process_id",
  ]


class Ended(Exception):
  """Replaces the end of the process."""


GONE = SystemExit("error: UNKNOWN: Gloo AllReduce failed")
CLOSED = jax.errors.JaxRuntimeError("INTERNAL: Connection closed by peer")
MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.fixture
def leave(monkeypatch, client):
  """`(error, others come) -> (ended at once, exit code, seconds waited)`."""

  def end(code):
    raise Ended(code)

  def run(error, others=True):
    waited = []

    def wait_at_barrier(name, milliseconds):
      waited.append(milliseconds // 1000)
      if not others:
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    client(wait_at_barrier=wait_at_barrier, key_value_set=lambda *_: None)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(interrupts.os, "_exit", end)
    with pytest.raises((Ended, SystemExit)) as caught:
      with distributed._ending_together():
        raise error
    code = caught.value.args[0]
    return caught.type is Ended, code, sum(waited)

  return run


@pytest.mark.parametrize(
  "error, others, expected",
  [
    (SystemExit(75), True, (False, 75, 30)),
    (SystemExit(75), False, (True, 75, 30)),
    (SystemExit("error: no"), False, (True, 1, 10)),
    (SystemExit(130), True, (True, 130, 0)),  # only it was interrupted
    (KeyboardInterrupt(), True, (True, 130, 0)),
    (KeyError("a bug"), True, (True, 1, 0)),
    (ValueError("UNKNOWN: Gloo AllGather failed"), True, (True, 1, 0)),
    (GONE, True, (True, 1, 0)),
    (CLOSED, True, (True, 1, 0)),
    (MEMORY, True, (True, 1, 0)),
  ],
)
def test_exit_codes(leave, error, others, expected, capsys):
  assert leave(error, others) == expected
  text = capsys.readouterr().err
  assert text.count("error: no\n") == (error.args == ("error: no",))
  is_local = isinstance(error, KeyError) or error is MEMORY
  assert ("Traceback" in text) == is_local
  is_gone = isinstance(error, ValueError) or error in (GONE, CLOSED)
  assert ("process 0: another process of this run is gone" in text) == is_gone
  assert ("the same command resumes" in text) == is_gone
