"""Terminal output: how far a program is, and text of others made harmless.

In a file or a pipe the progress is lines to grep, one a step. On a terminal a
table of the last steps and a bar are drawn anew (by rich), and what is printed
meanwhile stands above them:

    step  reward  length
      11    0.41    38.2
      12    0.44    37.9
    12/40 ━━━━━━━         step 13 · 4s · 2m04s left
"""

import contextlib
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpojax.runtime.files.records import duration

QUIET = 10.0
"""Seconds: an evaluation that takes no longer does not say how far it is."""

_ROWS = 8  # of the table, the newest steps
_BAR_WIDTH = 24  # characters


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

  def busy(self, words: str) -> None:
    """Says what begins now and takes long."""
    try:
      print(words, flush=True)
    except OSError as error:
      _continue_without_output(error)

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
      self.busy(f"evaluated {done} of {total} held-out prompts, {left} left")

  def stepped(
    self,
    step: int,
    left: float | None,
    line: str | None,
    cells: Mapping[str, str],
  ) -> None:
    """Takes a step that is done.

    `left` is in seconds, None if not known. A step that is shown has
    a line for a file, and the cells of the table by their headings.
    """
    if line:
      self.busy(line)


class LiveTable(Screen):
  """The last steps as a table on a terminal, above a bar.

  `steps` is their number in all, 0 where there are only evaluations.
  """

  def __init__(self, steps: int, seconds: Callable[[], float] = time.monotonic):
    super().__init__(seconds=seconds)
    self._steps, self._done = steps, 0
    self._doing, self._since = "starting", seconds()
    # Seconds until the end where that is known, and when that was so.
    self._left, self._left_at = 0.0, 0.0
    self._evaluation: tuple[int, int] | None = None  # prompts (done, total)
    self._rows: list[Mapping[str, str]] = []

  def busy(self, words: str) -> None:
    """Shows what begins now and takes long."""
    self._doing, self._since, self._evaluation = words, self.seconds(), None

  def evaluated(self, done: int, total: int) -> None:
    """Shows the bar of an evaluation for as long as it lasts."""
    self._evaluation = (done, total) if done < total else None
    if done in (0, total):
      self._since = self.seconds()

  def stepped(
    self,
    step: int,
    left: float | None,
    line: str | None,
    cells: Mapping[str, str],
  ) -> None:
    """Adds a row to the table, and moves the bar."""
    self._done, self._left, self._left_at = step, left or 0.0, self.seconds()
    self.busy(f"step {step + 1}" if step < self._steps else "finishing")
    if cells:
      self._rows = [*self._rows, cells][-_ROWS:]

  def draw(self) -> Group:
    """Returns the picture as it is now."""
    now, title, words = self.seconds(), "", [self._doing]
    done, total = self._done, self._steps
    if self._evaluation:
      (done, total), title, words = self._evaluation, "evaluating ", []
    if self._doing:
      words.append(duration(now - self._since))
    left = self._left - (now - self._left_at)
    if left > 0:
      words.append(f"{duration(left)} left")
    bar = Table.grid(padding=(0, 1))
    cells: list[Any] = []
    if total:
      cells.append(Text(f"{title}{done}/{total}", style="bold"))
      cells.append(ProgressBar(total=total, completed=done, width=_BAR_WIDTH))
    bar.add_row(*cells, Text(" · ".join(filter(None, words)), style="cyan"))
    return Group(_table(self._rows), bar) if self._rows else Group(bar)

  @contextlib.contextmanager
  def drawn(self) -> Iterator["LiveTable"]:
    """Draws until the context ends; then the last picture stays."""
    console = Console(file=sys.stdout, highlight=False)
    live = Live(
      console=console,
      get_renderable=self.draw,
      redirect_stderr=sys.stderr.isatty(),  # a file gets what is for it
      transient=not self._steps,
    )
    with live:
      console.show_cursor(True)  # whatever kills the program, it is there
      try:
        yield self
      finally:
        self._doing, self._left, self._evaluation = "", 0.0, None


def _table(rows: list[Mapping[str, str]]) -> Table:
  table = Table(box=None, pad_edge=False, header_style="dim")
  names = list(dict.fromkeys(name for row in rows for name in row))
  for name in names:
    if name:
      table.add_column(name, justify="right", overflow="fold")
    else:  # the last one, without a heading: what went wrong
      table.add_column(name, justify="left", style="red", overflow="fold")
  for i, row in enumerate(rows):
    newest = i == len(rows) - 1
    cells = [Text(row.get(name, "")) for name in names]
    table.add_row(*cells, style="" if newest else "dim")
  return table


def is_live(file: Any, environ: Mapping[str, str] = os.environ) -> bool:
  """Returns True for a terminal whose lines can be drawn anew.

  What a notebook runs by "!" writes to a terminal by name only: the notebook
  takes its lines as they come.
  """
  dumb = environ.get("TERM", "dumb").lower() in ("dumb", "unknown", "")
  live = file is not None and file.isatty()  # None: it was closed
  return live and not dumb and "JPY_PARENT_PID" not in environ


@contextlib.contextmanager
def opened(steps: int, every: int = 1) -> Iterator[Screen]:
  """Opens the screen of a program of `steps` steps, on its standard output.

  `every` is the number of batches of an evaluation between two lines of a file.
  """
  if is_live(sys.stdout):
    with LiveTable(steps).drawn() as table:
      yield table
  else:
    yield Screen(every)


def _continue_without_output(error: OSError) -> None:
  """Goes on where nobody reads standard output any more, or a disk is full."""
  with open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), sys.stdout.fileno())
  print(
    f"the standard output cannot be written ({error.strerror}): going on "
    "without it",
    file=sys.stderr,
  )
