"""Training on a terminal, to its end and interrupted."""

import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(words, ending=None):
  """Runs the toy on a terminal; after some steps it gets a signal.

  Returns:
    The exit code, and all that the terminal was sent.
  """
  ours, theirs = pty.openpty()
  environ = {k: v for k, v in os.environ.items() if k != "JPY_PARENT_PID"}
  environ |= {"PYTHONPATH": str(HERE.parent), "TERM": "xterm-256color"}
  process = subprocess.Popen(
    [sys.executable, str(HERE / "toy.py"), *words],
    env=environ | {"COLUMNS": "100", "JAX_PLATFORMS": "cpu"},
    stdin=theirs,
    stdout=theirs,
    stderr=theirs,
    start_new_session=True,
  )
  os.close(theirs)
  sent, end = "", time.monotonic() + 240
  while time.monotonic() < end:
    try:
      data = os.read(ours, 4096)
    except OSError:  # the other end is closed
      break
    sent += data.decode(errors="replace")
    if ending and "no variance" in sent:  # the table: a step is done
      process.send_signal(ending)
      ending = None
  os.close(ours)
  return process.wait(timeout=30), sent


@pytest.mark.parametrize(
  "ending, code, last_words",
  [
    pytest.param(
      signal.SIGTERM, 75, "saved step", marks=pytest.mark.slow, id="SIGTERM"
    ),
    pytest.param(
      signal.SIGINT, 130, "interrupted; ", marks=pytest.mark.long, id="Ctrl-C"
    ),
  ],
)
def test_a_signal_leaves_the_last_table_and_a_sentence(
  ending, code, last_words, toy, toy_model, tmp_path
):
  words = toy.arguments(toy_model, steps=100000, eval__every=1000)
  ended, sent = on_terminal([*words, f"--run_dir={tmp_path}"], ending)
  plain = MOVES.sub("", sent)
  assert ended == code, plain[-2000:]
  assert "the first step compiles" in plain and "evaluating 0/10" in plain
  assert re.search(r"step +reward +length +truncated +no variance", plain)
  assert ("SIGTERM: saving, then exiting" in plain) == (code == 75)
  assert re.search(last_words + ".*; the same command resumes", plain)
  assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")  # the cursor


@pytest.mark.long
def test_the_end(toy, toy_model, tmp_path):
  words = toy.arguments(toy_model, steps=3)
  code, sent = on_terminal([*words, f"--run_dir={tmp_path / 'whole'}"])
  plain = MOVES.sub("", sent)
  assert code == 0 and "Traceback" not in plain
  last = plain[plain.rindex("no variance") :]
  assert re.search(r"3/3 .*\n?.*accuracy before", last, re.DOTALL)
  assert f"python -m grpojax.chat --model={tmp_path / 'whole'}" in last
