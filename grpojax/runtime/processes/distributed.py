"""Several processes that train together: how they meet, agree and end.

Every process runs the same program on one global mesh (jax.distributed), and
computes whatever is cheap and the same for all: prompts, settings, how rows are
packed. What is not cheap on the host is dealt among them (`rows_of`: decoding
text and scoring it), and what is done once is done by process 0 (`on_main`: all
that is written into the run directory, but for checkpoints, which Orbax writes
from all of them).

A process that raises alone leaves the others waiting in their next collective,
so errors are exchanged where they are likely: `on_main`, `agreed`,
`check_same`. A process that is killed is noticed by the next collective, or by
JAX within `HEARTBEAT` seconds, which ends the others. One that ends by an error
says so.

Words go by JAX's coordination service, not by the devices, where they would
wait for all programs that were asked for before.

With one process, nothing of this communicates.
"""

import contextlib
import functools
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

HEARTBEAT = 30
"""Seconds after which a silent process counts as dead, and all others end."""

PATIENCE = 300
"""Seconds that a process waits for the others before a run."""

SAY_AFTER = 10.0
"""Seconds of waiting without a word."""

FLAGS = {
  "coordinator": setting(
    "", "HOST:PORT of process 0; not needed on Cloud TPU, GKE, SLURM"
  ),
  "num_processes": setting("", "how many there are, with --coordinator"),
  "process_id": setting(
    "", "number of this process, from 0, with --coordinator"
  ),
}
"""Flags of programs that run on several hosts: the arguments of `joined`."""


# How the processes meet.


@contextlib.contextmanager
def joined(
  coordinator: str = "", num_processes: str = "", process_id: str = ""
) -> Iterator[None]:
  """Joins the processes of a run, for as long as the context lasts.

  `coordinator`, HOST:PORT of process 0, how many processes there are, and the
  number of this one, from 0, are from the command line. Without them JAX finds
  the others (Cloud TPU, GKE, SLURM), or there is one process. Others than the
  first print nothing on standard output.

  Raises:
    ValueError: arguments that make no sense, or the others were not found.
    interrupts.Left: SIGTERM came while process 0 was not there yet.
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
      # While JAX waits, an exception of Ctrl-C would wait as well.
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
      # A single TPU host (Colab's) may have nobody to ask.
      text = f"one process alone: {str(error).splitlines()[0]}"
      print(text, file=sys.stderr)
  if not jax.distributed.is_initialized():
    yield
    return
  with contextlib.ExitStack() as stack:
    if not is_main():
      nowhere = stack.enter_context(open(os.devnull, "w"))
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    with _ending_together():
      yield


def _several(environ: Mapping[str, str]) -> bool:
  """Returns True in the environment of one of several processes.

  JAX finds the others by itself there; it is asked only then, since it takes an
  answer for granted.
  """
  tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
  slurm = "SLURM_PROCID" in environ and tasks.isdecimal() and int(tasks) > 1
  # libtpu writes a sentence there where it finds no hosts.
  hosts = environ.get("TPU_WORKER_HOSTNAMES", "")
  gke = "," in hosts and " " not in hosts
  return slurm or gke or "JAX_COORDINATOR_ADDRESS" in environ


def _on_tpu_vm() -> bool:
  """Returns True on a host with TPU chips, perhaps one of several."""
  chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
  return bool(chips) and importlib.util.find_spec("libtpu") is not None


def _from_arguments(
  coordinator: str, num_processes: str, process_id: str
) -> dict[str, Any]:
  """Returns options of `jax.distributed.initialize`, from the command line."""
  host, _, port = coordinator.rpartition(":")
  numbers = (port, num_processes, process_id)
  valid = host and all(text.isdecimal() for text in numbers)
  count, process = (int(n) if valid else 0 for n in numbers[1:])
  if not (process < count and 0 < int(port) < 2**16):
    raise ValueError(
      f"--coordinator={coordinator} --num_processes={num_processes} "
      f"--process_id={process_id}: give HOST:PORT of process 0, how many "
      "processes there are, N, and a number of 0 to N-1 to each"
    )
  return {
    "coordinator_address": coordinator,
    "num_processes": count,
    "process_id": process,
    "cluster_detection_method": "deactivate",
  }


def _find_coordinator(
  coordinator: str, process: int, problems: list[str]
) -> None:
  """Returns when JAX can connect to process 0, or process 0 can listen.

  `problems` holds what is wrong, for as long as it is.

  Raises:
    ValueError: this is process 0, and it cannot listen at the port.
    interrupts.Left: SIGTERM came meanwhile.
  """
  host, _, port = coordinator.rpartition(":")
  if process == 0:
    try:
      return socket.create_server(("", int(port))).close()
    except OSError as error:
      raise ValueError(
        f"port {port} of --coordinator cannot be had ({error.strerror}): end "
        "what uses it (another run, what is left of one, or a second "
        "--process_id=0), or give all processes another port"
      ) from error
  with interrupts.raising_sigterm():
    while True:
      try:
        address = host.strip("[]"), int(port)
        socket.create_connection(address, timeout=5).close()
        return problems.clear()
      except OSError as error:
        text = f"process 0 is not at {coordinator} ({error.strerror or error})"
        problems[:] = [text]
        time.sleep(0.2)


@contextlib.contextmanager
def _patience() -> Iterator[list[str]]:
  """Says that this process waits, and ends it where the context lasts long.

  JAX says nothing, and would abort with a trace. Yields a list for what is
  wrong, to be said then.
  """
  problems: list[str] = []

  def say(words: str) -> None:
    text = ": ".join([f"the other processes of this run {words}", *problems])
    print(text, file=sys.stderr, flush=True)

  def give_up() -> None:
    say(f"did not come within {PATIENCE} s")
    print(
      "start every one with the same --coordinator and --num_processes, and a "
      "--process_id of its own",
      file=sys.stderr,
    )
    interrupts.end(1)

  waiting = functools.partial(say, f"are waited for, {PATIENCE} s at most")
  with contextlib.ExitStack() as stack:
    for seconds, act in ((SAY_AFTER, waiting), (PATIENCE, give_up)):
      timer = threading.Timer(seconds, act)
      timer.daemon = True
      timer.start()
      stack.callback(timer.cancel)
    yield problems


# How they end.


@contextlib.contextmanager
def _ending_together() -> Iterator[None]:
  """Ends together with all other processes, or at once where something broke.

  Those that come here by an exit code (a message, SIGTERM) may all be on their
  way; by another error or Ctrl-C, it is alone, and the others notice.
  """
  code = None
  try:
    yield
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    interrupts.end(interrupts.INTERRUPTED)
  except BaseException as error:
    if _says_another_is_gone(error):
      print(
        f"process {jax.process_index()}: another process of this run is gone, "
        "see what it said last; the same command resumes from the last "
        f"checkpoint ({str(error).partition(chr(10))[0][:200]})",
        file=sys.stderr,
      )
      interrupts.end(1)
    if not isinstance(error, SystemExit):
      traceback.print_exc()
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        text = f"process {jax.process_index()}: {type(error).__name__}"
        jax_distributed.global_state.client.key_value_set(_GONE, text)
      interrupts.end(1)
    code = error.code or 0
    if isinstance(code, str):  # said before it waits
      print(code, file=sys.stderr, flush=True)
      code = 1
    if code == interrupts.INTERRUPTED:
      interrupts.end(code)
  # What all have refused, all have refused by now.
  seconds = 10 if code == 1 else HEARTBEAT
  try:
    # JAX's shutdown, of itself, aborts where another process does not come.
    client = jax_distributed.global_state.client
    client.wait_at_barrier("leaving", 1000 * seconds)
  except jax.errors.JaxRuntimeError:
    interrupts.end(code or 0)
  jax.distributed.shutdown()
  if code is not None:
    sys.exit(code)


def _says_another_is_gone(error: BaseException) -> bool:
  """Returns True for an error that another process's end has caused.

  That of a collective is a ValueError where a program is dispatched, and may
  have been turned into an exit's message since. Some of JAX's errors are of
  this process's own program: no memory is left, say.
  """
  own = "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND"
  text, of_jax = str(error), isinstance(error, jax.errors.JaxRuntimeError)
  if isinstance(error, OtherGone):
    return True
  return "Gloo" in text or (of_jax and not text.startswith(own))


# Who does what.


def count() -> int:
  """Number of processes."""
  # To ask JAX starts its devices, which is slow and may print: not for one.
  return jax.process_count() if jax.distributed.is_initialized() else 1


def several() -> bool:
  """Returns True where there are other processes."""
  return count() > 1


def is_main() -> bool:
  """Returns True in the process that writes files and prints: the first."""
  return not several() or jax.process_index() == 0


def rows_of(process: int, rows: int) -> slice:
  """Returns a process's part of some rows: a block, in the processes' order.

  Five rows of two processes: 0, 1, 2 and 3, 4.
  """
  block = -(-rows // count())
  return slice(min(process * block, rows), min((process + 1) * block, rows))


def my_rows(rows: int) -> slice:
  """Returns this process's part of some rows."""
  return rows_of(jax.process_index() if several() else 0, rows)


# What they agree on.


class OtherGone(Exception):
  """Another process of this run has ended by an error."""


_GONE = "grpojax/gone"
_words = itertools.count()  # of this process; the same in all


def _key(number: int, process: int) -> str:
  return f"grpojax/words/{number}/{process}"


def _receive(client: Any, key: str) -> bytes:
  """Waits for what another process says, or for its end."""
  while True:
    try:
      return client.blocking_key_value_get_bytes(key, 1000)
    except jax.errors.JaxRuntimeError as error:
      if not str(error).startswith("DEADLINE_EXCEEDED"):
        raise
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has
      raise OtherGone(client.key_value_try_get(_GONE))


def gather(value: Any) -> list[Any]:
  """Returns the values, of JSON's types or NaN, of all processes in order.

  All must call it.
  """
  if not several():
    return [value]
  client, own = jax_distributed.global_state.client, jax.process_index()
  number, text = next(_words), json.dumps(value).encode()
  if number == 0:  # devices connect now: in a minute it would be too late
    multihost_utils.process_allgather(np.int32(0))
  client.key_value_set_bytes(_key(number, own), text)
  texts = [
    text if i == own else _receive(client, _key(number, i))
    for i in range(count())
  ]
  if number:  # who has come here has read the words before
    client.key_value_delete(_key(number - 1, own))
  return [json.loads(text) for text in texts]


def on_main(function: Callable[[], Any]) -> Any:
  """Calls a function in the first process only, and returns its value in all.

  The value is of JSON's types. What it raises is a ValueError in the others.
  """
  if not several():
    return function()
  value = None
  with agreed():
    value = function() if is_main() else None
  return gather(value)[0]


@contextlib.contextmanager
def agreed() -> Iterator[None]:
  """Raises in all processes, at the end, what raises in here in one of them.

  In the others it is a ValueError. Nothing in here may wait for the others.
  """
  if not several():
    yield
    return
  raised, text = None, None
  try:
    yield
  except Exception as error:
    raised, text = error, f"{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, disk.WriteFailed)):
      text = str(error)
  texts = gather(text)
  if raised:
    raise raised
  for i, text in enumerate(texts):
    if text:
      raise ValueError(f"process {i}: {text}" if i else text)


def check_same(**values: str) -> None:
  """Raises ValueError in all processes where one was started with other things.

  The values are texts by name, such as the configuration and versions; it names
  what differs, with the first line of it that does.
  """
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
