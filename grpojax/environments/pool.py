"""Pool of workers that play environments, with a time limit for each step.

    with EnvironmentPool("guess.py", workers=2) as pool:
      sent = pool.submit([("reset", example, seed), ...])
      steps = pool.collect(sent)  # of each a Step, or an error in words

A step that raises, hangs, ends its process or answers something else costs its
own episode only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.environments import conventions, worker
from grpojax.environments.protocol import Step
from grpojax.runtime.processes import workers as workers_lib
from grpojax.runtime.processes.workers import Job, Submission

Call = Sequence[Any]
"""("reset", example, seed), ("step", state, action, example, seed) or, if the
environment `ends`, ("end", state, example, seed)."""

_LONGEST = 2**24  # bytes of an answer: an observation's, escaped, and a state's
_TRIAL = ("1", "", "a longer made-up answer")


class EnvironmentPool(workers_lib.WorkerPool):
  """Plays an environment of `conventions.resolve`; use it in a `with`.

  Without `workers` it plays in this process, which survives no crash. `timeout`
  is in seconds for a step; a class has as many for the reset and each earlier
  action, which are played again after a worker was lost.

  Attributes:
    tools: JSON schemas of the tools, for the chat template.
    ends: True if "end" must be called for episodes that are cut off.
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
    self.tools, self._timeout = environment.tools, timeout
    self.ends = environment.end is not None
    # A worker keeps its instances, so that an episode stays with it.
    super().__init__(worker, setup, workers, _LONGEST, pinned=self.ends)

  def submit(
    self, calls: Sequence[Call], places: Sequence[int] | None = None
  ) -> Submission:
    """Starts to play; ValueError if a call is no JSON.

    `places` choose the workers of calls; None is by their seeds.
    """
    jobs = []
    for i, call in enumerate(calls):
      # As a worker gets it, also without workers; no call sees another's.
      content, plays = json.loads(workers_lib.to_line(list(call))), 1
      if self.ends and content[0] != "reset":
        plays += 2 + len(content[1]["actions"])  # see `replay`
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
    """Waits for the calls; returns for each its Step, or an error in words."""
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
  """Plays an episode with made-up actions four times, side by side.

  `actions` come first. Returns the answers to its reset and to the actions,
  until it ends; ValueError if it cannot begin or answers differ.
  """
  calls, place = [("reset", example, seed)] * 4, "its reset"
  answers: list[Step | str] = []
  for action in (*actions, *_TRIAL, ""):
    # Only one of the four can go on with an instance; the others play again.
    steps = pool.collect(pool.submit(calls, range(4)), check_signals)
    answers.append(steps[0])
    first, *others = [x if isinstance(x, str) else x[:4] for x in steps]
    if different := [other for other in others if other != first]:
      raise ValueError(
        "the environment answers differently when it is played again, at"
        f" {place}: {first!r:.160} and {different[0]!r:.160}; a run with it"
        " would not resume exactly: draw random numbers from `seed`, `random`"
        " or `numpy.random`, and not from a generator without a seed"
      )
    if isinstance(first, str) and place == "its reset":
      raise ValueError(f"the environment cannot begin: it {first}")
    if isinstance(first, str) or steps[0].done:
      return answers
    calls = [("step", steps[0].state, action, example, seed)] * 4
    place = f"the action {action!r}"
  if pool.ends:
    calls = [("end", steps[0].state, example, seed)] * 4
    pool.collect(pool.submit(calls, range(4)), check_signals)
  return answers
