"""Terminal output: progress of evaluations, and escaped control characters."""

import time
import unicodedata
from collections.abc import Callable

from grpojax.runtime.files.records import duration

QUIET = 10.0  # seconds between two lines of an evaluation's progress


def printable(text: str) -> str:
  r"""Escapes control characters like Python's repr: "\x1b".

  Otherwise a model's text could move a terminal's cursor, change its title or
  type commands. Also escapes format characters (such as writing direction),
  lone surrogates and unassigned code points. Keeps newlines, tabs and spaces.
  """
  return "".join(
    c
    # isprintable() excludes "Zs", Unicode's category of spaces.
    if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"
    else c.encode("unicode_escape").decode()
    for c in text
  )


class Screen:
  """Prints an evaluation's progress every `every` batches.

  Prints at most one line per `QUIET` seconds; `seconds` reads a clock.
  """

  def __init__(self, every: int = 1, seconds: Callable = time.monotonic):
    self.every = every
    self.seconds = seconds
    self._start = self._last = 0.0
    self._batches = 0

  def evaluated(self, done: int, total: int) -> None:
    """Reports `done` of `total` prompts as evaluated; 0 starts the clock."""
    now = self.seconds()
    if not done:
      self._start = self._last = now
      self._batches = 0
      return
    self._batches += 1
    due = self._batches % self.every == 0 and now - self._last >= QUIET
    if due and done < total:
      self._last = now
      left = duration((now - self._start) * (total - done) / done)
      text = f"evaluated {done} of {total} held-out prompts, {left} left"
      print(text, flush=True)
