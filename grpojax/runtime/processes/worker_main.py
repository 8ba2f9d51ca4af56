"""The loop of a worker process, which `workers.Process` starts.

It reads lines `ID SECONDS JSON` from its standard input. The first one has what
the worker is prepared with; every other one is a job, which it answers with
lines [ID, OUTCOME], one or several. The ID is random, so that no answer passes
for one to another line.

A function that forks, reads, prints, closes files or writes to all that are
open does no harm to other jobs, but one that looks for the present ID in this
process can answer in its own favour: code that a model wrote needs a sandbox of
its own. The worker ends when its input does. Where its parent was killed, Linux
ends it whatever a function is doing; elsewhere the alarm does.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from grpojax.runtime.processes import user_calls

# Seconds beyond a job's limit, at which the parent kills a worker, after which
# the system does where the parent has died.
_LEEWAY = 2.0
_MEMORY = 2**33  # bytes of data that a worker may allocate

Answer = Callable[[Any], Iterable[Any]]
"""Makes of a job its outcomes, each a JSON value."""


def run(prepare: Callable[[Any], Answer]) -> None:
  """Answers until the input ends, and ends the process.

  `prepare` makes of the first line's JSON the function that answers.
  """
  with contextlib.suppress(BrokenPipeError):
    _serve(prepare)
  # At once: not waiting for threads that a function has started.
  with contextlib.suppress(OSError, ValueError):  # it may have closed it
    sys.stderr.flush()
  os._exit(0)


def _serve(prepare: Callable[[Any], Answer]) -> None:
  with contextlib.suppress(AttributeError, OSError):  # another system
    # Has Linux kill this process when the thread that started it has ended.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
  requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
  # A function that reads or prints must not disturb the exchange.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  sys.stdout.reconfigure(line_buffering=True)  # seen also if it is killed

  def reply(name: bytes, outcome: Any) -> None:
    # Begins a line, in case that something else wrote half of one.
    line = memoryview(f"\n{json.dumps([name.decode(), outcome])}\n".encode())
    while line:
      line = line[os.write(replies, line) :]

  name, _, setup = requests.readline().split(b" ", 2)
  try:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > _MEMORY:
      resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    answer = prepare(json.loads(setup))
  except BaseException as error:
    plain = isinstance(error, ValueError)
    reply(name, str(error) if plain else user_calls.describe(error))
    return
  reply(name, None)  # ready
  for line in requests:
    # The default action ends the process whatever a function is doing; set
    # again each time, because a function may have set it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    name, seconds, job = line.split(b" ", 2)
    limit = min(float(seconds) + _LEEWAY, user_calls.FOREVER)
    signal.setitimer(signal.ITIMER_REAL, limit)
    for outcome in answer(json.loads(job)):
      reply(name, outcome)
    signal.setitimer(signal.ITIMER_REAL, 0)
  # The parent waits a few seconds for it.
  user_calls.call(getattr(answer, "close", lambda: None))
