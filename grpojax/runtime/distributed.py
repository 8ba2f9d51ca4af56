"""Several processes that train together: who does what, and who says what.

Every process runs the same program on one global mesh (jax.distributed), and
computes whatever is cheap and the same for all: prompts, settings, how rows are
packed. What is not cheap on the host is dealt among them (`my_rows`: decoding
text and scoring it), and what is done once is done by process 0 (`on_main`: all
that is written into the run directory, but for checkpoints, which Orbax writes
from all of them).

A process that raises alone leaves the others waiting in their next collective,
so errors are exchanged where they are likely: `on_main`, `agreed`,
`check_same`. A process that is killed is noticed by JAX within `HEARTBEAT`
seconds, and ends the others.

With one process, nothing of this communicates.
"""

import contextlib
import glob
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from grpojax.runtime import disk, interrupts, leaving, rendezvous

HEARTBEAT = 30
"""Seconds after which a silent process counts as dead, and all others end."""


def _several(environ: Mapping[str, str]) -> bool:
  """Whether the environment is that of one of several processes.

  JAX finds the others by itself where it says so; it is asked only then, since
  it takes an answer for granted.
  """
  tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
  slurm = "SLURM_PROCID" in environ and tasks.isdecimal() and int(tasks) > 1
  # libtpu writes a sentence there where it finds no hosts.
  hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
  gke = "," in hosts and " " not in hosts
  return slurm or gke or "JAX_COORDINATOR_ADDRESS" in environ


def _on_tpu_vm() -> bool:
  """Whether this is a host with TPU chips, perhaps one of several."""
  chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
  return bool(chips) and importlib.util.find_spec("libtpu") is not None


def _given(
  coordinator: str, num_processes: str, process_id: str
) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize`, from the command line."""
  address, _, port = coordinator.rpartition(":")
  if not (address and port.isdecimal()):
    raise ValueError(
      f"--coordinator={coordinator}: expected HOST:PORT of process 0"
    )
  numbers = {"num_processes": num_processes, "process_id": process_id}
  for name, text in numbers.items():
    if not text.isdecimal():
      raise ValueError(
        f"--{name}={text}: with --coordinator, give --num_processes=N and "
        "--process_id=0 to N-1"
      )
  n, i = int(num_processes), int(process_id)
  if not i < n:
    raise ValueError(f"--process_id={i} must be in 0..{n - 1}")
  if not 0 < int(port) < 2**16:
    raise ValueError(f"--coordinator={coordinator}: there is no such port")
  return {"coordinator_address": coordinator, "num_processes": n} | {
    "process_id": i,
    "cluster_detection_method": "deactivate",
  }


@contextlib.contextmanager
def joined(
  coordinator: str = "", num_processes: str = "", process_id: str = ""
) -> Iterator[None]:
  """Joins the processes of a run, for as long as the context lasts.

  Processes other than the first print nothing on standard output.

  Args:
    coordinator: HOST:PORT of process 0, from the command line; empty is what
      JAX finds by itself (Cloud TPU, GKE, SLURM), or one process.
    num_processes: of the run; only with a coordinator.
    process_id: of this one, from 0; likewise.

  Raises:
    ValueError: arguments that make no sense, or the others were not found.
    interrupts.Left: one of them was ended before all were there.
  """
  options = {
    "heartbeat_timeout_seconds": HEARTBEAT,
    "shutdown_timeout_seconds": HEARTBEAT,
  }
  if coordinator:
    options |= _given(coordinator, num_processes, process_id)
  elif num_processes or process_id:
    raise ValueError(
      "--num_processes and --process_id need --coordinator=HOST:PORT"
    )
  elif not (_several(os.environ) or _on_tpu_vm()):
    yield
    return
  peers = {}
  if coordinator:
    address, _, port = coordinator.rpartition(":")
    who = int(num_processes), int(process_id)
    peers = rendezvous.meet(address, int(port), *who)
  try:
    # It says nothing, and hears no other Ctrl-C.
    with _said_if_long(), interrupts.become(signal.SIG_DFL):
      jax.distributed.initialize(**options)
  except Exception as error:
    if coordinator or _several(os.environ):
      raise ValueError(
        f"the other processes of this run were not found: {error}"
      ) from error
    # A single TPU host (Colab's) may have nobody to ask.
    print(f"one process alone: {str(error).splitlines()[0]}", file=sys.stderr)
    yield
    return
  with _standard_output(), leaving.together(HEARTBEAT, peers):
    yield


@contextlib.contextmanager
def _said_if_long(seconds: float = 10.0) -> Iterator[None]:
  words = "waiting for the other processes of this run, five minutes at most"
  told = {"file": sys.stderr, "flush": True}
  timer = threading.Timer(seconds, print, [words], told)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
  """Only the first process's own words go to standard output.

  What libraries write there from C++ (Gloo of each connection) goes to standard
  error.
  """
  sys.stdout.flush()
  before = os.dup(1)
  os.dup2(2, 1)
  try:
    target = before if is_main() else os.devnull
    like = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    with open(target, "w", 1, closefd=not is_main(), **like) as own:
      with contextlib.redirect_stdout(own):
        yield
  finally:
    os.dup2(before, 1)
    os.close(before)


def count() -> int:
  """How many processes there are."""
  # To ask JAX starts its devices, which is slow and may print: not for one.
  return jax.process_count() if jax.distributed.is_initialized() else 1


def several() -> bool:
  """Whether there are other processes."""
  return count() > 1


def is_main() -> bool:
  """Whether this is the process that writes files and prints: the first."""
  return not several() or jax.process_index() == 0


def rows_of(process: int, rows: int) -> slice:
  """Which rows are a process's: blocks, in the processes' order."""
  block = -(-rows // count())
  return slice(min(process * block, rows), min((process + 1) * block, rows))


def my_rows(rows: int) -> slice:
  """Which rows are this process's."""
  return rows_of(jax.process_index() if several() else 0, rows)


def gather(value: Any) -> list[Any]:
  """What every process says, in their order; all of them must call it.

  Args:
    value: of JSON's types; NaN is kept.
  """
  if not several():
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(text.size))
  padded = np.zeros(sizes.max(), np.uint8)
  padded[: text.size] = text
  rows = multihost_utils.process_allgather(padded)
  said = zip(rows, sizes, strict=True)
  return [json.loads(row[:size].tobytes()) for row, size in said]


def on_main(function: Callable[[], Any]) -> Any:
  """Calls a function in the first process only, and returns its value in all.

  Args:
    function: returns one of JSON's types.

  Raises:
    ValueError: in all processes, whatever it raised; in the first, itself.
  """
  if not several():
    return function()
  value = None
  with agreed():
    value = function() if is_main() else None
  return gather(value)[0]


@contextlib.contextmanager
def agreed() -> Iterator[None]:
  """What raises in here in one process raises in all of them, at the end.

  Nothing in here may wait for other processes.

  Raises:
    ValueError: with another process's error.
  """
  raised = None
  try:
    yield
  except Exception as error:
    if not several():
      raise
    raised = error
  if not several():
    return
  told = raised and f"{type(raised).__name__}: {raised}"
  if isinstance(raised, (ValueError, disk.WriteFailed)):
    told = str(raised)
  said = gather(told)
  if raised:
    raise raised
  for i, text in enumerate(said):
    if text:
      raise ValueError(f"process {i}: {text}" if i else text)


def check_same(**values: str) -> None:
  """Whether all processes were started with the same things.

  Args:
    **values: texts by name, such as the configuration and versions.

  Raises:
    ValueError: in all processes; names what differs, with the first line of it
      that does.
  """
  said = gather(values)
  for i, other in enumerate(said):
    for name, text in other.items():
      lines = zip(said[0][name].splitlines(), text.splitlines(), strict=False)
      if text != said[0][name]:
        first = [f"{a.strip()} and {b.strip()}" for a, b in lines if a != b]
        raise ValueError(
          f"processes 0 and {i} differ in {name}: "
          + (first or ["one is longer than the other"])[0]
          + "; start all of them with the same command, packages and files"
        )
