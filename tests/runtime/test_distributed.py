"""What several processes agree on, as far as one can see it; test_processes.py
starts several."""

import json
import os
import time

import numpy as np
import pytest

from grpojax.models import file_checksums
from grpojax.runtime import distributed
from grpojax.training.step.rewards import gather_rows


@pytest.mark.parametrize(
  "processes, count, expected",
  [
    (1, 5, [[0, 1, 2, 3, 4]]),
    (2, 5, [[0, 1, 2], [3, 4]]),
    (4, 5, [[0, 1], [2, 3], [4], []]),
    (3, 1, [[0], [], []]),
  ],
)
def test_rows(monkeypatch, processes, count, expected):
  monkeypatch.setattr(distributed, "count", lambda: processes)
  rows = range(count)
  found = [list(rows[distributed.rows_of(i, count)]) for i in range(processes)]
  assert found == expected


def speak_for(monkeypatch, *others):
  """This process is the first; the others say this, in JSON."""
  monkeypatch.setattr(distributed, "count", lambda: len(others) + 1)
  heard = list(others)

  def allgather(x):
    texts = [np.frombuffer(json.dumps(o).encode(), np.uint8) for o in heard]
    if x.ndim == 0:
      return np.array([x, *(t.size for t in texts)])
    return np.stack([x, *(np.pad(t, (0, x.size - t.size)) for t in texts)])

  module = distributed.multihost_utils
  monkeypatch.setattr(module, "process_allgather", allgather)


def test_rows_of_parts_come_back_in_their_order(monkeypatch):
  # Parts of 3 and 2 prompts: 0 1 | 2 and 3 | 4.
  speak_for(monkeypatch, [2, 4])
  assert gather_rows([0, 1, 3], [3, 2]) == [0, 1, 2, 3, 4]


def test_nan_is_said(monkeypatch):
  speak_for(monkeypatch, [[1.5, "é"]])
  mine, other = distributed.gather([float("nan")])
  assert np.isnan(mine[0]) and other == [[1.5, "é"]]


def test_another_processes_error_is_raised(monkeypatch):
  speak_for(monkeypatch, "no such file", None)
  with pytest.raises(ValueError, match="process 1: no such file"):
    with distributed.agreed():
      pass
  with pytest.raises(KeyError):  # of its own, as it is
    with distributed.agreed():
      raise KeyError("mine")


def test_what_differs_is_named(monkeypatch):
  speak_for(monkeypatch, {"config": "a\n  seed: 2\nb"})
  with pytest.raises(ValueError, match="0 and 1 differ in config: seed: 1 and"):
    distributed.check_same(config="a\n  seed: 1\nb")
  distributed.check_same(config="a\n  seed: 2\nb")


@pytest.mark.parametrize(
  "environ, expected",
  [
    ({}, False),
    ({"SLURM_NTASKS": "2"}, False),  # in an allocation, but not under srun
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, True),
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
    (
      {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
      False,
    ),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ({"TPU_WORKER_HOSTNAMES": "WARNING: none found, please set it"}, False),
    ({"TPU_WORKER_HOSTNAMES": "a.b,c.d"}, True),
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
  ],
)
def test_environments_of_several(environ, expected):
  assert distributed._several(environ) == expected


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


def test_a_long_wait_is_said(capsys):
  with distributed._said_if_long(60.0):
    pass
  assert capsys.readouterr().err == ""
  with distributed._said_if_long(0.01):
    time.sleep(0.2)
  assert "waiting for the other processes" in capsys.readouterr().err


def test_only_the_first_processs_words_go_to_standard_output(
  capfd, monkeypatch
):
  for count, own in ((1, "mine\n"), (2, "")):
    monkeypatch.setattr(distributed, "is_main", lambda first=count == 1: first)
    with distributed._standard_output():
      print("mine")
      os.write(1, b"a library's\n")
    told = capfd.readouterr()
    assert told.out == own and told.err == "a library's\n"
  print("again")
  assert capfd.readouterr().out == "again\n"
