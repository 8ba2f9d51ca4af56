"""What a file says, whatever it is written in."""

import re
from typing import Any, NamedTuple

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Source(NamedTuple):
  """What a file says.

  Attributes:
    settings: its values by name; of nested ones by dotted path.
    unread: what could not be read as a value: names, and what stands there.
    guarded: of a Python file, whether importing it runs nothing (what it runs
      is under `if __name__ == "__main__"`).
  """

  settings: dict[str, Any]
  unread: dict[str, str]
  guarded: bool = True


def plain(value: Any) -> Any:
  """A value with texts like "1e-6", which YAML leaves texts, as numbers."""
  if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
    text = value.strip()
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
  return value
