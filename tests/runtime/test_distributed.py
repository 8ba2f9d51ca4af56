"""Agreements and ends of processes, the others being stand-ins.

test_processes.py starts real ones.
"""

import json
import os
import signal
import socket
import types

import jax
import numpy as np
import pytest

from grpojax.models.huggingface import file_checksums
from grpojax.runtime.processes import distributed, interrupts
from grpojax.training.step import rewards as rewards_lib


def test_rows(monkeypatch):
  for processes, count, expected in (
    (1, 5, [[0, 1, 2, 3, 4]]),
    (2, 5, [[0, 1, 2], [3, 4]]),
    (4, 5, [[0, 1], [2, 3], [4], []]),
  ):
    monkeypatch.setattr(distributed, "count", lambda n=processes: n)
    rows = range(count)
    dealt = [rows[distributed.rows_of(i, count)] for i in range(processes)]
    assert list(map(list, dealt)) == expected


@pytest.fixture
def client(monkeypatch):
  """`(its methods) -> None`: this process is the first, with this client."""

  def use(**methods):
    made = types.SimpleNamespace(**methods)
    monkeypatch.setattr(distributed, "_client", lambda: made)
    monkeypatch.setattr(jax, "process_index", lambda: 0)

  return use


@pytest.fixture
def speak_for(monkeypatch, client):
  """`(the others' values) -> the messages that this process has sent`."""

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


def test_messages_are_deleted_when_all_have_read_them(speak_for):
  sent = speak_for("b")
  for _ in range(3):
    assert distributed.gather("a") == ["a", "b"]
  assert list(sent.values()) == [b'"a"']


def test_who_waits_hears_of_an_end_by_an_error(client):
  def late(key, milliseconds):
    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")

  client(
    blocking_key_value_get_bytes=late,
    key_value_try_get=lambda key: "process 1: KeyError",
  )
  with pytest.raises(distributed.OtherGone, match="process 1") as gone:
    distributed._receive("words")
  assert distributed._says_another_is_gone(gone.value)


def test_values_of_all_processes(speak_for):
  speak_for([[1.5, "é"]])
  mine, other = distributed.gather([float("nan")])
  assert np.isnan(mine[0]) and other == [[1.5, "é"]]
  # Parts of 3 and 2 prompts: 0 1 | 2 and 3 | 4.
  speak_for([2, 4])
  assert rewards_lib.gather_rows([0, 1, 3], [3, 2]) == [0, 1, 2, 3, 4]


def test_another_processes_error_is_raised(speak_for):
  speak_for("no such file", None)
  with pytest.raises(ValueError, match="process 1: no such file"):
    with distributed.agreed():
      pass
  with pytest.raises(KeyError):  # of its own, as it is
    with distributed.agreed():
      raise KeyError("mine")


def test_what_differs_is_named(speak_for):
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
    ("SLURM_NTASKS=1 SLURM_PROCID=0", False),
    ("SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", False),
    ("TPU_WORKER_HOSTNAMES=localhost", False),
  ],
)
def test_environments_of_several(words, several):
  environ = dict(word.split("=") for word in words.split())
  assert distributed._several(environ) == several
  warning = {"TPU_WORKER_HOSTNAMES": "WARNING: none found, please set it"}
  assert not distributed._several(warning)


def test_fingerprints_of_models(tmp_path):
  file = tmp_path / "model.safetensors"
  data = np.random.default_rng(0).bytes(10**7)
  file.write_bytes(data)
  one = file_checksums.fingerprint(tmp_path)
  assert one.startswith("model.safetensors: 10000000 bytes")
  file.write_bytes(data[:-1] + b"!")
  (tmp_path / "checksums.json").write_text("{}")
  assert file_checksums.fingerprint(tmp_path) == one  # between two blocks
  file.write_bytes(b"!" + data[1:])
  assert file_checksums.fingerprint(tmp_path) != one


@pytest.mark.parametrize(
  "words, message",
  [
    (("here",), "--coordinator=here --num_processes= .*: give HOST:PORT"),
    (("", "", "1"), "--process_id=1: give HOST:PORT"),
    (("here:99999", "2", "0"), "give HOST:PORT of process 0"),
    (("here:1", "2", "2"), "--process_id=2: give .*a number of 0 to N-1"),
  ],
)
def test_wrong_arguments_are_said(words, message):
  with pytest.raises(ValueError, match=message):
    with distributed.joined(*words):
      pass


@pytest.fixture
def server():
  """A port where somebody listens."""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    yield listener


def test_a_port_that_is_in_use_is_said_at_once(server):
  address = f"127.0.0.1:{server.getsockname()[1]}"
  with pytest.raises(ValueError, match="of --coordinator cannot be had"):
    with distributed.joined(address, "2", "0"):
      pass
  distributed._find_coordinator(address, 1, [])  # there it may be process 0


def test_sigterm_is_heeded_while_waiting_for_the_first(
  server, monkeypatch, capsys
):
  """Sent when the wait is over, in the place of the process's end."""
  ends = []

  def end(code):
    ends.append(code)
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(interrupts, "end", end)
  monkeypatch.setattr(distributed, "PATIENCE", 0.5)
  monkeypatch.setattr(distributed, "SAY_AFTER", 0.2)
  address = f"127.0.0.1:{server.getsockname()[1]}"
  server.close()
  with pytest.raises(interrupts.Left, match="ended by SIGTERM"):
    with distributed.joined(address, "2", "1"):
      pass
  assert ends == [1]
  problem = f": process 0 is not at {address} (Connection refused)"
  assert capsys.readouterr().err.splitlines() == [
    f"the other processes of this run are waited for, 0.5 s at most{problem}",
    f"the other processes of this run did not come within 0.5 s{problem}",
    "start every one with the same --coordinator and --num_processes, and a "
    "--process_id of its own",
  ]


class Ended(Exception):
  """In the place of the process's end."""


@pytest.fixture
def leave(monkeypatch, client):
  """(error, whether the others come) -> how it ended, how long it waited."""

  def end(code):
    raise Ended(code)

  def run(error, others=True):
    waited = []

    def wait_at_barrier(name, milliseconds):
      waited.append(milliseconds // 1000)
      if not others:
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    client(
      wait_at_barrier=wait_at_barrier, key_value_set=lambda key, text: None
    )
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
    (SystemExit(130), True, (True, 130, 0)),  # it alone was interrupted
    (KeyboardInterrupt(), True, (True, 130, 0)),
    (KeyError("a bug"), True, (True, 1, 0)),
  ],
)
def test_exit_codes(leave, error, others, expected, capsys):
  assert leave(error, others) == expected
  err = capsys.readouterr().err
  assert err.count("error: no\n") == (error.args == ("error: no",))
  assert ("KeyError: 'a bug'" in err) == isinstance(error, KeyError)


@pytest.mark.parametrize(
  "error, gone",
  [
    (jax.errors.JaxRuntimeError("INTERNAL: Connection closed by peer"), True),
    (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset"), True),
    (SystemExit("error: UNKNOWN: Gloo AllReduce failed"), True),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
  ],
)
def test_others_that_are_gone_are_said_to_be(leave, error, gone, capsys):
  assert leave(error) == (True, 1, 0)
  err = capsys.readouterr().err
  assert ("process 0: another process of this run is gone" in err) == gone
  assert ("the same command resumes" in err) == gone
  assert ("Traceback" in err) != gone
