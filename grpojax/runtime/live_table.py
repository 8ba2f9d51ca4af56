"""The last steps as a table on a terminal, above a bar; drawn by rich."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpojax.runtime.records import duration

ROWS = 8  # of the newest steps
WIDTH = 24  # of the bar, in characters


@dataclasses.dataclass
class View:
  """What is on the screen now; `draw` makes a picture of it.

  Attributes:
    steps: in all; 0 where there are only evaluations.
    done: of them.
    left: seconds, None where that is not known.
    left_at: when that was so.
    doing: what goes on.
    since: when that began.
    evaluated: of the prompts of an evaluation that goes on; None else.
    rows: cells of the last steps, by their headings.
  """

  steps: int
  since: float
  done: int = 0
  left: float | None = None
  left_at: float = 0.0
  doing: str = "starting"
  evaluated: tuple[int, int] | None = None
  rows: list[Mapping[str, str]] = dataclasses.field(default_factory=list)


def _table(rows: list[Mapping[str, str]]) -> Table:
  names = list(dict.fromkeys(name for row in rows for name in row))
  table = Table(box=None, pad_edge=False, header_style="dim")
  for name in names:
    note = not name  # the last one, without a heading: what went wrong
    table.add_column(
      name,
      justify="left" if note else "right",
      style="red" if note else "",
      overflow="fold",
    )
  for i, row in enumerate(rows):
    newest = "" if i == len(rows) - 1 else "dim"
    table.add_row(*(Text(row.get(name, "")) for name in names), style=newest)
  return table


def draw(view: View, now: float) -> Group:
  """The table and the bar."""
  total, done, what = view.steps, view.done, ""
  if view.evaluated:
    done, total = view.evaluated
    what = "evaluating "
  left = (view.left or 0) - (now - view.left_at)
  said = [view.doing] * bool(view.doing and not view.evaluated)
  said += [duration(now - view.since)] * bool(view.doing)
  said += [f"{duration(left)} left"] * (left > 0)
  bar = Table.grid(padding=(0, 1))
  cells = [Text(f"{what}{done}/{total}", style="bold")] if total else []
  if total:
    cells.append(ProgressBar(total=total, completed=done, width=WIDTH))
  bar.add_row(*cells, Text(" · ".join(said), style="cyan"))
  return Group(*[_table(view.rows)] * bool(view.rows), bar)


@contextlib.contextmanager
def opened(
  steps: int, seconds: Callable[[], float] = time.monotonic
) -> Iterator[tuple[Callable[..., None], ...]]:
  """Draws until the context ends; then the last picture stays.

  Args:
    steps: see `View`.
    seconds: a clock.

  Yields:
    `busy`, `evaluated` and `stepped` of `screen.Screen`.
  """
  view = View(steps, seconds())

  def busy(words):
    view.doing, view.since, view.evaluated = words, seconds(), None

  def evaluated(done, total):
    view.evaluated = (done, total) if done < total else None
    if done in (0, total):
      view.since = seconds()

  def stepped(step, left, line, cells):
    del line
    view.done, view.left, view.left_at = step, left, seconds()
    busy(f"step {step + 1}" if step < steps else "finishing")
    if cells:
      view.rows = [*view.rows, cells][-ROWS:]

  console = Console(file=sys.stdout, highlight=False)
  live = Live(
    console=console,
    get_renderable=lambda: draw(view, seconds()),
    redirect_stderr=sys.stderr.isatty(),  # a file gets what is for it
    transient=not steps,
  )
  with live:
    console.show_cursor(True)  # whatever kills the program, it is there
    try:
      yield busy, evaluated, stepped
    finally:
      view.doing, view.left, view.evaluated = "", None, None
