"""Terminal output: progress of evaluations, and escaped control characters."""

import itertools
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


def progress(
  total: int, every: int, seconds: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
  """Returns a function to call with the number of evaluated prompts.

  It prints a line every `every` calls, but at most one per `QUIET` seconds.
  `total` is the number of all prompts; `seconds` reads a clock.
  """
  calls = itertools.count(1)
  start = last = seconds()

  def evaluated(done: int) -> None:
    nonlocal last
    now = seconds()
    due = next(calls) % every == 0 and now - last >= QUIET
    if due and done < total:
      last = now
      left = duration((now - start) * (total - done) / done)
      text = f"evaluated {done} of {total} held-out prompts, {left} left"
      print(text, flush=True)

  return evaluated
