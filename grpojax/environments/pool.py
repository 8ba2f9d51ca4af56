"""Pool of worker processes for environments, with a time limit per step.

    with EnvironmentPool("guess.py", workers=2) as pool:
      sent = pool.submit([("reset", example, seed), ...])
      steps = pool.collect(sent)  # a Step or an error message per call

If a step raises, hangs, ends its process or returns an invalid value, only its
own episode fails.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.environments import conventions, worker
from grpojax.environments.protocol import Step
from grpojax.runtime.processes import workers as workers_lib
from grpojax.runtime.processes.workers import Job, Submission

Call = Sequence[Any]
"""Name and arguments of a function: ("reset", example, seed), ("step", state,
action, example, seed) or, with `ends` of a pool, ("end", state, example, seed).
"""

_LONGEST = 2**24  # maximum bytes of an answer, whose JSON may be escaped
_MADE_UP_ACTIONS = ("1", "", "a longer made-up answer")


class EnvironmentPool(workers_lib.WorkerPool):
  """Worker pool for an environment of `conventions.resolve`; use it in `with`.

  With 0 `workers` it runs in this process, so a crash ends the program.
  `timeout` is in seconds per step. For a class the limit grows with the actions
  so far, because a new worker has to play them again.

  Attributes:
    tools: JSON schemas of the tools, for the chat template.
    ends: True if "end" must be called for unfinished episodes.
  """

  def __init__(
    self,
    path: str,
    tools: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    tool_format: str = "hermes",
    action: str = "auto",
    workers: int = 0,
    timeout: int | float = 30.0,
  ):
    setup = {"path": path, "tools": [*tools], "tool_format": tool_format}
    setup |= {"options": dict(options or {}), "action": action}
    environment = conventions.resolve(**setup)
    self.tools = environment.tools
    self._timeout = timeout
    self.ends = environment.end is not None
    # Episodes stay with their worker, which keeps the instances.
    super().__init__(worker, setup, workers, _LONGEST, pinned=self.ends)

  def submit(
    self, calls: Sequence[Call], places: Sequence[int] | None = None
  ) -> Submission:
    """Starts calls; ValueError if a call is not JSON.

    If `ends`, calls with equal `places` (default: seeds) share a worker.
    """
    jobs = []
    for i, call in enumerate(calls):
      # Copy by way of JSON even without workers, so that calls share no data.
      content = json.loads(workers_lib.to_line(list(call)))
      plays = 1
      if self.ends and content[0] != "reset":
        plays += 2 + len(content[1]["actions"])  # a replay repeats all steps
      place = content[-1] if places is None else places[i]
      jobs.append(Job(content, 1, self._timeout * plays, place))
    sent = Submission(jobs)
    self.start(sent)
    return sent

  def collect(
    self,
    submission: Submission,
    check_signals: Callable[[], None] = lambda: None,
  ) -> list[Step | str]:
    """Waits for calls; returns a Step or an error message per call."""
    steps: list[Step | str] = [""] * len(submission.jobs)
    for _, done in self.results([submission], check_signals):
      (steps[done.index],) = done.outcomes or [done.error]
    return steps


def check_replay(
  pool: EnvironmentPool,
  example: dict[str, Any],
  seed: int,
  check_signals: Callable[[], None] = lambda: None,
  actions: Sequence[str] = (),
) -> list[Step | str]:
  """Tests that an episode can be repeated, by playing it four times at once.

  The episode has `actions`, then made-up actions. Returns the answers to the
  reset and to each action. ValueError if the reset fails or answers differ.
  """
  calls = [("reset", example, seed)] * 4
  stage = "its reset"
  answers: list[Step | str] = []
  for action in (*actions, *_MADE_UP_ACTIONS, ""):  # the last is not played
    # A worker's first call gets the live instance; further calls replay it.
    steps = pool.collect(pool.submit(calls, range(4)), check_signals)
    answers.append(steps[0])
    first, *others = [x if isinstance(x, str) else x[:4] for x in steps]
    if different := [other for other in others if other != first]:
      raise ValueError(
        "the environment answers differently when it is played again, at"
        f" {stage}: {first!r:.160} and {different[0]!r:.160}; a run could not"
        " resume exactly: draw random numbers from `seed`, `random` or"
        " `numpy.random`, not from a generator without a seed"
      )
    if isinstance(first, str) and stage == "its reset":
      raise ValueError(f"the environment cannot begin: it {first}")
    if isinstance(first, str) or steps[0].done:
      return answers
    calls = [("step", steps[0].state, action, example, seed)] * 4
    stage = f"the action {action!r}"
  if pool.ends:
    calls = [("end", steps[0].state, example, seed)] * 4
    pool.collect(pool.submit(calls, range(4)), check_signals)
  return answers
