"""Progress lines and escaped text."""

import types
import unicodedata

from grpojax.runtime.terminal import screen


def test_long_evaluations_print_their_progress(capsys):
  clock = types.SimpleNamespace(now=100.0)
  seconds = lambda: clock.now
  for _ in range(3):  # short evaluations print nothing
    evaluated = screen.progress(4, 2, seconds)
    for done in (1, 2, 3, 4):
      clock.now += 2.4
      evaluated(done)
    clock.now += 1000
  evaluated = screen.progress(100, 2, seconds)
  for done in range(10, 101, 10):
    clock.now += 6
    evaluated(done)
  # Every second batch, at least 10 s after the previous line; not at the end.
  assert capsys.readouterr().out == "".join(
    f"evaluated {done} of 100 held-out prompts, {60 - 3 * done // 5}s left\n"
    for done in (20, 40, 60, 80)
  )


def test_control_characters_are_escaped():
  text = "7 + 3 = 10\n\tgr\u00fc\u00df \u4f60\u597d \U0001f600 a\u00a0b\u3000c"
  assert screen.printable(text) == text
  shown = screen.printable("\x1b[2J\x1b]0;title\x07 right\rwrong \ud800")
  assert shown == r"\x1b[2J\x1b]0;title\x07 right\rwrong \ud800"
  every = screen.printable("".join(map(chr, range(0x3000))))
  left = {unicodedata.category(c) for c in every if c not in "\n\t"}
  # Cc starts control sequences; Cf reverses the direction of writing.
  assert not left & {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
