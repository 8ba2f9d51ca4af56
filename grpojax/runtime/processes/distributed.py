"""Training on several processes: how they join, agree and end together.

Every process runs the same program on one global mesh (jax.distributed), and
repeats cheap work: prompts, settings, packing. `rows_of` splits the decoding of
texts and their rewards. Only process 0 writes the run directory (`on_main`),
except for checkpoints, which Orbax writes from all processes.

If one process raised an error alone, the others would wait for it in their next
collective. So `on_main`, `agreed` and `check_same` exchange errors. A killed
process is noticed by the next collective, or by JAX within `HEARTBEAT` seconds.

Messages use JAX's coordination service (a private API), because devices would
deliver them only after all previously dispatched programs.
"""

import contextlib
import glob
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk
from grpojax.runtime.processes import interrupts

HEARTBEAT = 30  # seconds after which a silent process counts as dead
PATIENCE = 300  # seconds to wait for the other processes at the start
SAY_AFTER = 10.0  # seconds of waiting before a message

FLAGS = {  # arguments of `joined`, for programs on several hosts
  "coordinator": setting(
    "", "HOST:PORT of process 0; not needed on Cloud TPU, GKE, SLURM"
  ),
  "num_processes": setting("", "number of processes (with --coordinator)"),
  "process_id": setting("", "process number, from 0 (with --coordinator)"),
}


# Start


@contextlib.contextmanager
def joined(
  coordinator: str = "", num_processes: str = "", process_id: str = ""
) -> Iterator[None]:
  """Connects the processes of a run; inside the context only process 0 prints.

  `FLAGS` describes the arguments. Without them JAX finds the other processes
  (Cloud TPU, GKE, SLURM), if any. ValueError if the arguments are wrong or no
  process answers; interrupts.Left at SIGTERM before process 0 is reachable.
  """
  options: dict[str, Any] = {}
  if coordinator or num_processes or process_id:
    options = _from_arguments(coordinator, num_processes, process_id)
  elif not (_several(os.environ) or _on_tpu_vm()):
    yield
    return
  with _patience() as problems:
    if options:
      _find_coordinator(coordinator, options["process_id"], problems)
    try:
      # JAX's wait would delay a KeyboardInterrupt.
      with interrupts.handled(signal.SIG_DFL, signal.SIGINT):
        jax.distributed.initialize(
          **options,
          initialization_timeout=PATIENCE + 30,
          heartbeat_timeout_seconds=HEARTBEAT,
          shutdown_timeout_seconds=HEARTBEAT,
        )
    except Exception as error:
      if options or _several(os.environ):
        raise ValueError(
          f"the other processes of this run were not found: {error}"
        ) from error
      # A single TPU host (Colab's) may have no metadata server.
      _say(f"running as one process: {str(error).splitlines()[0]}")
  with contextlib.ExitStack() as stack:
    if not is_main():
      devnull = stack.enter_context(open(os.devnull, "w"))
      stack.enter_context(contextlib.redirect_stdout(devnull))
    if jax.distributed.is_initialized():
      stack.enter_context(_ending_together())
    yield


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _several(environ: Mapping[str, str]) -> bool:
  """Returns True if environment variables tell JAX of other processes."""
  tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
  slurm = "SLURM_PROCID" in environ and tasks.isdecimal() and int(tasks) > 1
  # If libtpu finds no hosts, this variable holds a sentence.
  hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
  gke = "," in hosts and " " not in hosts
  return slurm or gke or "JAX_COORDINATOR_ADDRESS" in environ


def _on_tpu_vm() -> bool:
  """Returns True on a host with TPU chips, which may be one of several."""
  chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
  return bool(chips) and importlib.util.find_spec("libtpu") is not None


def _from_arguments(coordinator, num_processes, process_id) -> dict[str, Any]:
  """Converts the flags to arguments of `jax.distributed.initialize`."""
  host, _, port = coordinator.rpartition(":")
  numbers = (port, num_processes, process_id)
  valid = host and all(text.isdecimal() for text in numbers)
  count, process = (int(n) if valid else 0 for n in numbers[1:])
  if not (process < count and 0 < int(port) < 2**16):
    raise ValueError(
      f"--coordinator={coordinator} --num_processes={num_processes} "
      f"--process_id={process_id}: give HOST:PORT of process 0, the number N "
      "of processes, and to each process a number from 0 to N-1"
    )
  return {
    "coordinator_address": coordinator,
    "num_processes": count,
    "process_id": process,
    "cluster_detection_method": "deactivate",
  }


def _find_coordinator(coordinator, process, problems) -> None:
  """Waits until process 0 is reachable; in process 0, checks its port instead.

  Puts the reason for the wait into `problems`.
  """
  host, _, port = coordinator.rpartition(":")
  if process == 0:
    try:
      return socket.create_server(("", int(port))).close()
    except OSError as error:
      raise ValueError(
        f"port {port} of --coordinator is not free ({error.strerror}): end the "
        "program that uses it (another run, a leftover process, or a second "
        "--process_id=0), or give all processes another port"
      ) from error
  address = host.strip("[]"), int(port)
  with interrupts.raising_sigterm():
    while True:
      try:
        socket.create_connection(address, timeout=5).close()
        return problems.clear()
      except OSError as error:
        why = error.strerror or error
        problems[:] = [f"process 0 is not at {coordinator} ({why})"]
        time.sleep(0.2)


@contextlib.contextmanager
def _patience() -> Iterator[list[str]]:
  """Reports a long wait for other processes; ends it after `PATIENCE` seconds.

  JAX itself would wait silently and abort. Yields a list to put the reason in.
  """
  problems: list[str] = []
  success = threading.Event()

  def watch() -> None:
    others = "the other processes of this run"
    for seconds, text in (
      (SAY_AFTER, f"waiting for {others}, {PATIENCE} s at most"),
      (PATIENCE - SAY_AFTER, f"{others} did not come within {PATIENCE} s"),
    ):
      if success.wait(seconds):
        return
      _say(": ".join([text, *problems]))
    _say(
      "start each process with the same --coordinator and --num_processes, and "
      "its own --process_id"
    )
    interrupts.end(1)

  threading.Thread(target=watch, daemon=True).start()
  try:
    yield problems
  finally:
    success.set()


# End


@contextlib.contextmanager
def _ending_together() -> Iterator[None]:
  """Waits for the other processes at the end; after an error ends at once.

  An exit with a message, or by SIGTERM, happens in all processes. Other errors
  and Ctrl-C end one process; the other processes notice its end.
  """
  code = None
  try:
    yield
  except KeyboardInterrupt:
    _say("interrupted")
    interrupts.end(interrupts.INTERRUPTED)
  except BaseException as error:
    if _caused_by_another(error):
      _say(
        f"process {jax.process_index()}: another process of this run is gone, "
        "see its last output; the same command resumes from the last "
        f"checkpoint ({str(error).partition(chr(10))[0][:200]})"
      )
      interrupts.end(1)
    if not isinstance(error, SystemExit):
      traceback.print_exc()
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        text = f"process {jax.process_index()}: {type(error).__name__}"
        _client().key_value_set(_GONE, text)
      interrupts.end(1)
    code = error.code or 0
    if isinstance(code, str):  # shown before the wait
      _say(code)
      code = 1
    if code == interrupts.INTERRUPTED:
      interrupts.end(code)
  # A common error reaches all processes at about the same time.
  seconds = 10 if code == 1 else HEARTBEAT
  try:
    # JAX's own shutdown would abort if another process did not come.
    _client().wait_at_barrier("leaving", 1000 * seconds)
  except jax.errors.JaxRuntimeError:
    interrupts.end(code or 0)
  jax.distributed.shutdown()
  if code is not None:
    sys.exit(code)


def _caused_by_another(error: BaseException) -> bool:
  """Returns True if the end of another process caused the error.

  A failed collective raises ValueError at dispatch, which a caller may turn
  into SystemExit. Some of JAX's errors are local, such as out of memory.
  """
  if isinstance(error, OtherGone):
    return True
  text = str(error)
  local = "RESOURCE_EXHAUSTED INVALID_ARGUMENT UNIMPLEMENTED NOT_FOUND".split()
  from_jax = isinstance(error, jax.errors.JaxRuntimeError)
  return "Gloo" in text or (from_jax and not text.startswith(tuple(local)))


# Division of work


def count() -> int:
  """Returns the number of processes."""
  # `jax.process_count` initializes devices, which is slow and may print.
  return jax.process_count() if jax.distributed.is_initialized() else 1


def several() -> bool:
  """Returns True if there are other processes."""
  return count() > 1


def is_main() -> bool:
  """Returns True in process 0, which writes files and prints."""
  return not several() or jax.process_index() == 0


def rows_of(process: int, rows: int) -> slice:
  """Returns a process's block of rows: rows 0 to 2 of 5 for process 0 of 2."""
  block = -(-rows // count())
  return slice(min(process * block, rows), min((process + 1) * block, rows))


def my_rows(rows: int) -> slice:
  """Returns this process's block of rows."""
  return rows_of(jax.process_index() if several() else 0, rows)


# Agreement


class OtherGone(Exception):
  """Raised if another process of this run ended with an error."""


_GONE = "grpojax/gone"
_numbers = itertools.count()  # numbers the messages, alike in all processes


def _client() -> Any:
  return jax_distributed.global_state.client


def _key(number: int, process: int) -> str:
  return f"grpojax/words/{number}/{process}"


def _receive(key: str) -> bytes:
  """Waits for another process's message; raises OtherGone if it ended."""
  while True:
    try:
      return _client().blocking_key_value_get_bytes(key, 1000)
    except jax.errors.JaxRuntimeError as error:
      if not str(error).startswith("DEADLINE_EXCEEDED"):
        raise
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # none has ended
      raise OtherGone(_client().key_value_try_get(_GONE))


def gather(value: Any) -> list[Any]:
  """Exchanges JSON values (or NaN); returns all processes' values in order."""
  if not several():
    return [value]
  me = jax.process_index()
  n = next(_numbers)
  text = json.dumps(value).encode()
  if n == 0:  # connecting devices later than a minute fails
    multihost_utils.process_allgather(np.int32(0))
  _client().key_value_set_bytes(_key(n, me), text)
  texts = [text if i == me else _receive(_key(n, i)) for i in range(count())]
  if n:  # now all processes have read the previous message
    _client().key_value_delete(_key(n - 1, me))
  return [json.loads(text) for text in texts]


def on_main(function: Callable[[], Any]) -> Any:
  """Calls a function in process 0; all processes return its JSON value."""
  value = None
  with agreed():
    if is_main():
      value = function()
  return gather(value)[0]


@contextlib.contextmanager
def agreed() -> Iterator[None]:
  """Raises one process's exception in all processes (others raise ValueError).

  Code inside the context must not wait for other processes.
  """
  if not several():
    yield
    return
  raised = text = None
  try:
    yield
  except Exception as error:
    raised = error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, disk.WriteFailed)):
      text = str(error)
  texts = gather(text)
  if raised:
    raise raised
  for i, text in enumerate(texts):
    if text:
      raise ValueError(f"process {i}: {text}" if i else text)


def check_same(**values: str) -> None:
  """Raises ValueError in all processes if the texts in `values` differ."""
  first, *others = gather(values)
  for i, other in enumerate(others, 1):
    for name, text in other.items():
      if text == first[name]:
        continue
      pairs = zip(first[name].splitlines(), text.splitlines(), strict=False)
      lines = (f"{a.strip()} and {b.strip()}" for a, b in pairs if a != b)
      raise ValueError(
        f"processes 0 and {i} differ in {name}: "
        + next(lines, "one is longer than the other")
        + "; start all of them with the same command, packages and files"
      )
