"""Hostile text is inert on a terminal."""

import unicodedata

import pytest

from grpojax.runtime.printable import printable


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
  assert printable(text) == (text if shown is None else shown)


def test_no_control_character_is_left():
  every = "".join(map(chr, range(0x3000)))
  left = {unicodedata.category(c) for c in printable(every) if c not in "\n\t"}
  assert not left & {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
