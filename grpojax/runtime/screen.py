"""Where a program shows how far it is: lines, or a table on a terminal.

In a file or a pipe these are lines to grep, one a step. On a terminal a table
of the last steps and a bar are drawn anew (by rich), and what is printed
meanwhile stands above them.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from grpojax.runtime.records import duration

QUIET = 10.0
"""Seconds: an evaluation that takes no longer does not say how far it is."""


class Screen(NamedTuple):
  """How to say how far a program is; made by `opened`.

  Attributes:
    busy: `(words)`, what begins now and takes long.
    evaluated: `(done, total)`, held-out prompts of an evaluation, 0 at its
      beginning.
    stepped: `(step, left, line, cells)`, after each step: the seconds that are
      left, None where that is not known; and, where the step is shown, the line
      for a file and the table's cells by their headings, else None and {}.
  """

  busy: Callable[[str], None]
  evaluated: Callable[[int, int], None]
  stepped: Callable[[int, float | None, str | None, Mapping[str, str]], None]


def is_live(file: Any, environ: Mapping[str, str] = os.environ) -> bool:
  """Whether a file is a terminal whose lines can be drawn anew.

  What a notebook runs by "!" writes to a terminal by name only: the notebook
  takes its lines as they come.
  """
  dumb = environ.get("TERM", "dumb").lower() in ("dumb", "unknown", "")
  live = file is not None and file.isatty()  # None: it was closed
  return live and not dumb and "JPY_PARENT_PID" not in environ


@contextlib.contextmanager
def opened(
  steps: int, every: int = 1, seconds: Callable[[], float] = time.monotonic
) -> Iterator[Screen]:
  """The screen of a program, on its standard output.

  Args:
    steps: of the program in all; 0 for one that only evaluates.
    every: batches of an evaluation between two lines, see `in_lines`.
    seconds: a clock.
  """
  if is_live(sys.stdout):
    from grpojax.runtime import live_table

    with live_table.opened(steps, seconds) as (busy, evaluated, stepped):
      yield Screen(busy, evaluated, stepped)
  else:
    yield in_lines(every, seconds)


def _go_on_without(error: OSError) -> None:
  """Where nobody reads what is printed any more, or it cannot be written."""
  with open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), sys.stdout.fileno())
  print(
    f"the standard output cannot be written ({error.strerror}): going on "
    "without it",
    file=sys.stderr,
  )


def in_lines(
  every: int = 1, seconds: Callable[[], float] = time.monotonic
) -> Screen:
  """A screen of lines.

  Args:
    every: a long evaluation says how far it is after so many batches, and not
      before `QUIET` seconds have passed since it last did.
    seconds: a clock.
  """
  began = last = 0.0
  batches = 0

  def evaluated(done, total):
    nonlocal began, last, batches
    now = seconds()
    if not done:
      began, last, batches = now, now, 0
      return
    batches += 1
    if batches % every == 0 and now - last >= QUIET and done < total:
      last = now
      left = duration((now - began) * (total - done) / done)
      say(f"evaluated {done} of {total} held-out prompts, {left} left")

  def say(line):
    try:
      print(line, flush=True)
    except OSError as error:
      _go_on_without(error)

  def stepped(step, left, line, cells):
    del step, left, cells
    if line:
      say(line)

  return Screen(say, evaluated, stepped)
