"""How far a program is: lines in a file, a table on a terminal."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from grpojax.runtime import live_table, screen

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
  """Stands still until it is put forward."""

  now = 100.0

  def __call__(self):
    return self.now


def test_long_evaluations_say_how_far_they_are(capsys):
  clock = Clock()
  told = screen.in_lines(every=2, seconds=clock)
  told.evaluated(0, 100)
  for done in range(10, 101, 10):
    clock.now += 6
    told.evaluated(done, 100)
  # Every second batch, no sooner than 10 s after the last; none at the end.
  assert capsys.readouterr().out.splitlines() == [
    "evaluated 20 of 100 held-out prompts, 48s left",
    "evaluated 40 of 100 held-out prompts, 36s left",
    "evaluated 60 of 100 held-out prompts, 24s left",
    "evaluated 80 of 100 held-out prompts, 12s left",
  ]


def test_short_evaluations_are_silent(capsys):
  clock = Clock()
  told = screen.in_lines(seconds=clock)
  for _ in range(3):  # each begins anew, however long ago the first was
    told.evaluated(0, 4)
    for done in (1, 2, 3, 4):
      clock.now += 2.4
      told.evaluated(done, 4)
    clock.now += 1000
  assert capsys.readouterr().out == ""


def test_a_file_gets_the_lines_of_steps_that_are_shown(capsys):
  told = screen.in_lines()
  told.busy("the first step compiles")
  told.stepped(1, None, "step 1/2  reward 0.5", {"step": "1"})
  told.stepped(2, 0.0, None, {})
  lines = capsys.readouterr().out.splitlines()
  assert lines == ["the first step compiles", "step 1/2  reward 0.5"]


def test_a_reader_that_goes_away_does_not_end_the_program():
  lines = [
    "import sys",
    "from grpojax.runtime import screen",
    "told = screen.in_lines()",
    "for step in range(5):",
    "  told.stepped(step, None, f'step {step}', {})",
    "  sys.stdin.readline()",
    "print('all steps', file=sys.stderr)",
  ]
  program = subprocess.Popen(
    [sys.executable, "-c", "\n".join(lines)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert program.stdout.readline() == "step 0\n"
  program.stdout.close()
  _, said = program.communicate("\n" * 5, timeout=60)
  assert program.returncode == 0 and said == (
    "the standard output cannot be written (Broken pipe): going on without "
    "it\nall steps\n"
  )


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize(
  "file, environ, live",
  [
    (Terminal(), {"TERM": "xterm-256color"}, True),
    (io.StringIO(), {"TERM": "xterm-256color"}, False),
    (Terminal(), {"TERM": "dumb"}, False),
    (Terminal(), {}, False),
    (None, {"TERM": "xterm-256color"}, False),
    (Terminal(), {"TERM": "xterm-color", "JPY_PARENT_PID": "7"}, False),
  ],
)
def test_only_a_terminal_is_drawn_anew(file, environ, live):
  assert screen.is_live(file, environ) is live


def drawn(view, now, width=80):
  console = Console(file=io.StringIO(), width=width, force_terminal=False)
  console.print(live_table.draw(view, now))
  return console.file.getvalue()


def test_the_picture_has_the_steps_and_the_time_left():
  view = live_table.View(40, since=100.0, done=12, left=130.0, left_at=98.0)
  view.doing = "step 13"
  view.rows = [
    {"step": "11", "reward": "0.41"},
    {"step": "12", "reward": "0.44", "": "2 updates skipped"},
  ]
  lines = drawn(view, 104.0).strip().splitlines()
  head, first, second, bar = lines
  assert head.split() == ["step", "reward"]
  assert first.split() == ["11", "0.41"]
  assert second.split() == ["12", "0.44", "2", "updates", "skipped"]
  assert re.match(r"12/40 \S+ +step 13 · 4s · 2m04s left", bar)
  assert "left" not in drawn(view, 300.0)  # it takes longer than was thought


def test_an_evaluation_has_the_bar_while_it_lasts():
  view = live_table.View(40, since=0.0, done=12, left=130.0)
  view.evaluated = 96, 256
  assert re.match(r"evaluating 96/256 \S+ +1s · 2m09s left", drawn(view, 1.0))
  assert "12/40" not in drawn(view, 1.0)


@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_no_line_is_longer_than_the_terminal(width):
  view = live_table.View(40, since=0.0, done=12, left=130.0, doing="step 13")
  names = "step reward length truncated entropy tokens/s seconds".split()
  view.rows = [dict.fromkeys(names, "123.4")]
  assert max(map(len, drawn(view, 1.0, width).splitlines())) <= width


@contextlib.contextmanager
def terminal(monkeypatch):
  """A terminal as standard output; yields a list of all that it was sent."""
  ours, theirs = pty.openpty()
  sent = []

  def read():
    with contextlib.suppress(OSError):  # its other end is closed
      while data := os.read(ours, 4096):
        sent.append(data.decode())

  reader = threading.Thread(target=read)
  reader.start()
  monkeypatch.setenv("TERM", "xterm-256color")
  monkeypatch.delenv("JPY_PARENT_PID", raising=False)
  with open(theirs, "w", 1) as file, contextlib.redirect_stdout(file):
    yield sent
  reader.join()
  os.close(ours)


def test_a_terminal_gets_a_table_and_what_is_printed(monkeypatch):
  with terminal(monkeypatch) as sent:
    with screen.opened(2) as told:
      told.busy("the first step compiles, which takes a while")
      told.stepped(1, None, "the line of a file", {"step": "1", "reward": ".5"})
      print("held-out accuracy 7%")
      told.stepped(2, 0.0, "the line of a file", {"step": "2", "reward": ".6"})
    assert not isinstance(sys.stdout, io.StringIO)
    print("after it")
  text = "".join(sent)
  plain = MOVES.sub("", text)
  assert "held-out accuracy 7%" in plain and "the line of a file" not in plain
  # The last picture stays, and what comes later is below it.
  last = plain[plain.rindex("reward") :]
  assert re.search(r"1 +\.5\s+2 +\.6\s+2/2 \S+\s+after it\s*$", last), last
  assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor


def test_an_error_leaves_the_terminal_as_it_was(monkeypatch):
  with terminal(monkeypatch) as sent:
    before = sys.stdout
    with pytest.raises(KeyboardInterrupt):
      with screen.opened(2) as told:
        told.busy("the first step compiles, which takes a while")
        raise KeyboardInterrupt
    assert sys.stdout is before
  # Even while it draws, the cursor is there: a kill leaves it.
  text = "".join(sent)
  assert text.count("\x1b[?25h") == 2 and text.count("\x1b[?25l") == 1
  assert "compiles" not in MOVES.sub("", text).splitlines()[-1]
