"""What reward workers are sent: completions, one by one or a group together.

Functions that score a completion at a time have a task for each completion;
those that want all completions of a prompt (TRL's convention) have a task for
each group. A task has one time limit: that of a completion, times how many.
"""

import concurrent.futures
import itertools
import json
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpojax.rewards import conventions, functions
from grpojax.rewards.outcomes import Outcome


class Job(NamedTuple):
  """What is scored: two texts, and the example (of JSON values)."""

  prompt: str
  completion: str
  example: dict[str, Any]


class Task(NamedTuple):
  """What is done in one go.

  Attributes:
    functions: numbers of those that score it.
    jobs: numbers of the completions.
  """

  functions: Sequence[int]
  jobs: Sequence[int]


def plan(
  rewards: Sequence[functions.Reward], groups: Sequence[Sequence[int]]
) -> list[Task]:
  """The tasks of all functions and completions.

  Args:
    rewards: the functions.
    groups: numbers of the completions that are of one prompt.
  """
  together = [isinstance(r, conventions.Trl) for r in rewards]
  of_groups = [i for i, whole in enumerate(together) if whole]
  of_jobs = [i for i, whole in enumerate(together) if not whole]
  jobs = sorted(job for group in groups for job in group)
  tasks = [Task(of_jobs, [job]) for job in jobs if of_jobs]
  return tasks + [Task(of_groups, group) for group in groups if of_groups]


class Submission:
  """Jobs on their way; made by `Pool.submit`.

  A class because threads write into it what they find.
  """

  def __init__(self, jobs: list[Job], tasks: list[Task], names: int):
    self.jobs, self.tasks = jobs, tasks
    self.lines: list[bytes] = []
    self.next = itertools.count().__next__  # atomic
    # Of each completion, in the order of the functions.
    self.outcomes = [[Outcome(None)] * names for _ in jobs]
    self.lost = 0  # workers in a row, without a result between them
    self.lock = threading.Lock()
    self.abandoned = False
    self.futures: list[concurrent.futures.Future] = []
    self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # one a worker

  def items(self, task: Task) -> list[Job]:
    """The completions of a task."""
    return [self.jobs[i] for i in task.jobs]

  def keep(self, task: Task, outcomes: Sequence[Outcome]) -> None:
    """Keeps what a task came to: of each function, all its completions."""
    found = iter(outcomes)
    for function in task.functions:
      for job in task.jobs:
        self.outcomes[job][function] = next(found)


def cut_short(task: Task, found: Sequence[Outcome], error: str):
  """The outcomes of a task whose worker was lost.

  The error is that of the function that was at work, and of all of its
  completions; those after it have no value.

  Args:
    task: the task.
    found: outcomes that came before.
    error: why it was lost.
  """
  each = len(task.jobs)
  done = len(found) // each
  rest = len(task.functions) - done - 1
  lost = [Outcome(None, error)] * each
  return [*found[: done * each], *lost, *[Outcome(None)] * (rest * each)]


def line(message: Any) -> bytes:
  """A message to a worker.

  Raises:
    ValueError: it has something that is no JSON.
  """

  def plain(value):
    if hasattr(value, "tolist"):  # of NumPy
      return value.tolist()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")

  try:
    return json.dumps(message, default=plain).encode() + b"\n"
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"only JSON reaches the reward workers (or use 0 workers): {error}"
    ) from error
