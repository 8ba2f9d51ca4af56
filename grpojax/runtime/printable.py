"""Text of others, to be shown on a terminal: it says what it is, and no more.

A model may write whatever its data taught it, also the control sequences by
which a terminal moves its cursor, changes its title or answers as if somebody
had typed.
"""

import unicodedata

_KEPT = ("\n", "\t")
_SPACE = "Zs"  # Unicode's category of spaces, which isprintable() refuses


def printable(text: str) -> str:
  r"""A text whose control characters are written as what they are.

  Args:
    text: of anybody.

  Returns:
    The text; control and format characters (those that change the direction of
    writing, too), lone surrogates and what is no character are escaped as
    Python does it: "\x1b". Newlines and tabs stay.
  """
  return "".join(
    c
    if c.isprintable() or c in _KEPT or unicodedata.category(c) == _SPACE
    else c.encode("unicode_escape").decode()
    for c in text
  )
