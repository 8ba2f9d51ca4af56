"""A process that computes rewards: python -m grpojax.rewards.worker.

It reads lines `ID JSON` from its standard input: the first says which
functions, each other one is a task: completions to score, and by which of them.
For each function and completion it answers with a line [ID, value, error,
extras]; the ID is random, so no reply can be taken for one to another line.
What the functions print goes to standard error.

Functions are trusted not to attack: one that forks, reads, prints, closes files
or writes to all that are open does no harm to other completions, but one that
looks for the present ID in this process can answer in its own favour. Who runs
code that a model wrote must do it in a sandbox of its own.

It ends when its input does, that is, also when the other process was killed;
and if a function hangs then, the system's alarm ends it (see `LEEWAY`).
"""

import contextlib
import copy
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from grpojax.rewards import conventions, functions, outcomes
from grpojax.rewards.outcomes import Outcome

LEEWAY = 2.0
"""Seconds beyond a completion's limit after which the system ends a worker. The
parent kills it at the limit; this is for a worker whose parent has died."""


def evaluate(
  reward: functions.Reward, items: Sequence[conventions.Item]
) -> list[Outcome]:
  """The rewards of completions, or what went wrong.

  An error is an exception, but for Ctrl-C, and a value that is neither None nor
  a finite number; None abstains. Only this process returns, not one that the
  function has forked; and what it changes in an example, nobody else sees.

  Args:
    reward: the function.
    items: prompt, completion and example of each; all of one prompt where the
      function has them together.
  """
  items = [(*texts, copy.deepcopy(example)) for *texts, example in items]
  if not isinstance(reward, conventions.Trl):
    return [_try(lambda: [reward(*item)], 1)[0] for item in items]  # noqa: B023
  return _try(lambda: reward(items), len(items))


def _try(call: Callable[[], Sequence[Any]], count: int) -> list[Outcome]:
  """What a call returns for so many completions."""
  try:
    with functions.one_process():
      values = list(call())
    if len(values) != count:
      said = f"returned {len(values)} rewards for {count} completions"
      return [Outcome(None, said)] * count
    return list(map(outcomes.of_value, values))
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # asyncio's and pytest's, and SystemExit
    return [outcomes.raised(error)] * count


def _limit_memory(size: int) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  _, most = resource.getrlimit(resource.RLIMIT_DATA)
  if most != resource.RLIM_INFINITY:
    size = min(size, most)
  resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main() -> None:
  """Answers until the input ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.dup(1)
  # A function that reads or prints must not disturb the exchange.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  sys.stdout.reconfigure(line_buffering=True)  # seen also if it is killed

  def reply(name: bytes, *outcome: Any) -> None:
    # Begins a line, in case that something else wrote half of one.
    answer = json.dumps([name.decode(), *outcome])
    os.write(replies, f"\n{answer}\n".encode())

  name, _, line = requests.readline().partition(b" ")
  setup = json.loads(line)
  try:
    _limit_memory(setup["memory"])
    what = [setup[key] for key in ("names", "options", "sources")]
    rewards = functions.resolve_all(*what)
  except ValueError as error:
    reply(name, None, str(error), {})
    return
  except BaseException as error:
    reply(name, None, functions.describe(error), {})
    return
  reply(name, "ready", None, {})
  for line in requests:
    # The default action ends the process whatever a function is doing; set
    # again each time, because a function may have set it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    name, _, task = line.partition(b" ")
    which, items = json.loads(task)
    limit = setup["timeout"] * len(items) + LEEWAY
    signal.setitimer(signal.ITIMER_REAL, limit)
    for i in which:
      for outcome in evaluate(rewards[i], items):
        reply(name, *outcome)
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
  try:
    main()
  except BrokenPipeError:
    pass
  # At once: not waiting for threads that a function has started.
  with contextlib.suppress(OSError, ValueError):  # it may have closed it
    sys.stderr.flush()
  os._exit(0)
