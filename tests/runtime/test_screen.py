"""Progress as lines in a file and a table on a terminal; hostile text."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading
import unicodedata

import pytest
from rich.console import Console

from grpojax.runtime.terminal import screen

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
  """Stands still until it is put forward."""

  now = 100.0

  def __call__(self):
    return self.now


def test_long_evaluations_say_how_far_they_are(capsys):
  clock = Clock()
  lines = screen.Screen(every=2, seconds=clock)
  for _ in range(3):  # short ones are silent, however long ago the first was
    lines.evaluated(0, 4)
    for done in (1, 2, 3, 4):
      clock.now += 2.4
      lines.evaluated(done, 4)
    clock.now += 1000
  lines.evaluated(0, 100)
  for done in range(10, 101, 10):
    clock.now += 6
    lines.evaluated(done, 100)
  # Every second batch, no sooner than 10 s after the last; none at the end.
  assert capsys.readouterr().out.splitlines() == [
    "evaluated 20 of 100 held-out prompts, 48s left",
    "evaluated 40 of 100 held-out prompts, 36s left",
    "evaluated 60 of 100 held-out prompts, 24s left",
    "evaluated 80 of 100 held-out prompts, 12s left",
  ]


def test_a_file_gets_the_lines_of_steps_that_are_shown(capsys):
  lines = screen.Screen()
  lines.busy("the first step compiles")
  lines.stepped(1, None, "step 1/2  reward 0.5", {"step": "1"})
  lines.stepped(2, 0.0, None, {})
  lines = capsys.readouterr().out.splitlines()
  assert lines == ["the first step compiles", "step 1/2  reward 0.5"]


def test_a_reader_that_goes_away_does_not_end_the_program():
  lines = [
    "import sys",
    "from grpojax.runtime.terminal import screen",
    "lines = screen.Screen()",
    "for step in range(5):",
    "  lines.stepped(step, None, f'step {step}', {})",
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


def test_only_a_terminal_is_drawn_anew():
  good = {"TERM": "xterm-256color"}
  assert screen.is_live(Terminal(), good)
  for file in (io.StringIO(), None):
    assert not screen.is_live(file, good)
  for environ in ({"TERM": "dumb"}, {}, good | {"JPY_PARENT_PID": "7"}):
    assert not screen.is_live(Terminal(), environ)


@pytest.fixture
def table():
  """A table after 12 of 40 steps, in the thirteenth, and its clock."""
  clock = Clock()
  table = screen.LiveTable(40, clock)
  table.stepped(11, None, "", {"step": "11", "reward": "0.41"})
  cells = {"step": "12", "reward": "0.44", "": "2 updates skipped"}
  table.stepped(12, 130.0, "", cells)
  return table, clock


def drawn(table, width=80):
  console = Console(file=io.StringIO(), width=width, force_terminal=False)
  console.print(table.draw())
  return console.file.getvalue()


def test_the_picture_has_the_steps_and_the_time_left(table):
  table, clock = table
  clock.now += 4
  head, first, second, bar = drawn(table).strip().splitlines()
  assert head.split() == ["step", "reward"]
  assert first.split() == ["11", "0.41"]
  assert second.split() == ["12", "0.44", "2", "updates", "skipped"]
  assert re.match(r"12/40 \S+ +step 13 · 4s · 2m06s left", bar)
  clock.now += 200
  assert "left" not in drawn(table)  # it takes longer than was thought


def test_an_evaluation_has_the_bar_while_it_lasts(table):
  table, clock = table
  table.evaluated(0, 256)
  clock.now += 1
  table.evaluated(96, 256)
  *_, bar = drawn(table).splitlines()
  assert re.match(r"evaluating 96/256 \S+ +1s · 2m09s left", bar)
  table.evaluated(256, 256)
  assert "12/40" in drawn(table)


def test_no_line_is_longer_than_the_terminal(table):
  names = "step reward length truncated entropy tokens/s seconds".split()
  table[0].stepped(13, 99.0, "", dict.fromkeys(names, "123.4"))
  for width in (10, 40, 80, 300):
    assert max(map(len, drawn(table[0], width).splitlines())) <= width


def test_a_terminal_gets_a_table_and_what_is_printed(monkeypatch):
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
    with screen.opened(2) as table:
      table.busy("the first step compiles, which takes a while")
      table.stepped(1, None, "a file's line", {"step": "1", "reward": ".5"})
      print("held-out accuracy 7%")
      table.stepped(2, 0.0, "a file's line", {"step": "2", "reward": ".6"})
    print("after it")
  reader.join()
  os.close(ours)
  text = "".join(sent)
  plain = MOVES.sub("", text)
  assert "held-out accuracy 7%" in plain and "a file's line" not in plain
  # The last picture stays, and what comes later is below it.
  last = plain[plain.rindex("reward") :]
  assert re.search(r"1 +\.5\s+2 +\.6\s+2/2 \S+\s+after it\s*$", last), last
  # Even while it draws, the cursor is there: a kill leaves it.
  assert text.count("\x1b[?25h") == 2 and text.count("\x1b[?25l") == 1
  assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize(
  "text, shown",
  [
    ("7 + 3 = 10\n\tso", "7 + 3 = 10\n\tso"),
    ("gr\u00fc\u00df dich \u4f60\u597d \U0001f600", None),
    ("a\u00a0b\u3000c", None),  # spaces of other widths
    ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
    ("right\rwrong", "right\\rwrong"),
    ("\x9b6n", "\\x9b6n"),  # C1: also begins a control sequence
    ("abc\u202efdp", "abc\\u202efdp"),  # writes from right to left
    ("\u2028", "\\u2028"),
    ("\ud800", "\\ud800"),  # cannot be encoded
  ],
)
def test_controls_are_escaped_and_text_stays(text, shown):
  assert screen.printable(text) == (text if shown is None else shown)


def test_no_control_character_is_left():
  every = screen.printable("".join(map(chr, range(0x3000))))
  left = {unicodedata.category(c) for c in every if c not in "\n\t"}
  assert not left & {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
