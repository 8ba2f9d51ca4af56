"""Terminal output: progress of evaluations, and escaped control characters."""

import time
import unicodedata
from collections.abc import Callable

from grpojax.runtime.files.records import duration

QUIET = 10.0
"""Seconds: an evaluation that takes no longer does not say how far it is."""


def printable(text: str) -> str:
  r"""Escapes control characters as Python does: "\x1b".

  A model may write sequences that move a terminal's cursor, change its title or
  make it type. Control and format characters (as of the direction of writing),
  lone surrogates and unassigned code points are escaped; newlines, tabs and
  spaces of any width stay.
  """
  return "".join(
    c
    # "Zs" is Unicode's category of spaces, which isprintable() refuses.
    if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"
    else c.encode("unicode_escape").decode()
    for c in text
  )


class Screen:
  """Prints how far an evaluation is, every `every` batches.

  At most one line in `QUIET` seconds; `seconds` is a clock.
  """

  def __init__(
    self, every: int = 1, seconds: Callable[[], float] = time.monotonic
  ):
    self.every, self.seconds = every, seconds
    self._start = self._last = 0.0
    self._batches = 0

  def evaluated(self, done: int, total: int) -> None:
    """Takes the number of held-out prompts done; 0 at the beginning."""
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
