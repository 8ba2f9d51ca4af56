"""Terminal output: how far a program is, and text of others made harmless."""

import time
import unicodedata
from collections.abc import Callable

from grpojax.runtime.files.records import duration

QUIET = 10.0
"""Seconds: an evaluation that takes no longer does not say how far it is."""


def printable(text: str) -> str:
  r"""Returns a text whose control characters are written as what they are.

  A model may write whatever its data taught it, also the control sequences by
  which a terminal moves its cursor, changes its title or answers as if somebody
  had typed. Control and format characters (those that change the direction of
  writing, too), lone surrogates and what is no character are escaped as Python
  does it: "\x1b". Newlines, tabs and spaces of any width stay.
  """
  return "".join(
    c
    # "Zs" is Unicode's category of spaces, which isprintable() refuses.
    if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"
    else c.encode("unicode_escape").decode()
    for c in text
  )


class Screen:
  """Lines on standard output that say how far a program is.

  An evaluation has a line every `every` batches, but none before `QUIET`
  seconds have passed since the last one. `seconds` is a clock.
  """

  def __init__(
    self, every: int = 1, seconds: Callable[[], float] = time.monotonic
  ):
    self.every, self.seconds = every, seconds
    self._start = self._last = 0.0
    self._batches = 0

  def evaluated(self, done: int, total: int) -> None:
    """Takes the held-out prompts of an evaluation; 0 at its beginning."""
    now = self.seconds()
    if not done:
      self._start, self._last, self._batches = now, now, 0
      return
    self._batches += 1
    due = self._batches % self.every == 0 and now - self._last >= QUIET
    if due and done < total:
      self._last = now
      left = duration((now - self._start) * (total - done) / done)
      text = f"evaluated {done} of {total} held-out prompts, {left} left"
      print(text, flush=True)
