"""A configuration of TRL or verl as a config file of grpojax.

    python -m grpojax.translate FILE [--out=CONFIG.py]
                                [--processes=N] [--examples=N]

FILE is TRL's GRPOConfig (YAML or JSON of its fields, or the Python script that
makes it) or verl's trainer configuration (YAML, or the shell script with its
KEY=VALUE). It is read, never run. CONFIG.py gets the settings with the other
library's names beside them, and above them what means something else here and
what has no counterpart; without --out it is printed. TRL counts batches for
each of its processes: --processes says how many there were. Both count epochs:
--examples says how many training prompts there are.

Ends with code 1 where grpojax would refuse the config, and says why.
"""

import pathlib
import sys

from grpojax.runtime import command_line, records
from grpojax.runtime.screen import printable
from grpojax.runtime.settings import setting
from grpojax.training.config import validate
from grpojax.translation import files, writing
from grpojax.translation.parts import Translation

FLAGS = {
  "file": setting("", "the configuration of TRL or verl"),
  "out": setting("", 'config file to write; "" = the screen'),
  "processes": setting(1, "that TRL was started with", within="[1, inf)"),
  "examples": setting(
    0, "training prompts, which epochs are counted by", within="[0, inf)"
  ),
}
SETTINGS = None


def _say(found: Translation) -> None:
  """Prints what means something else, and what has no counterpart."""
  titles = {
    "means something else here": found.differs,
    "has no counterpart": found.missing,
  }
  for title, notes in titles.items():
    for line in dict.fromkeys(f"{n.theirs} {title}: {n.text}" for n in notes):
      print(printable(f"- {line}"))


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  program = "python -m grpojax.translate"
  with command_line.usage_errors():
    _, flags = command_line.parse(
      argv, FLAGS, SETTINGS, program, positional="file", about=__doc__
    )
    if not flags.file:
      raise ValueError("give FILE: a .yaml, .json, .py or .sh of TRL or verl")
    file, examples = pathlib.Path(flags.file), flags.examples or None
    if flags.out:
      records.check_writable(flags.out)
    library, found = files.translate(file, flags.processes, examples)
    text = writing.config_file(found, library, file.name)
    if flags.out:
      records.write_text(flags.out, text)
      print(f"{file} ({library}) -> {flags.out}")
      _say(found)
    else:
      print(text, end="")
    try:
      validate(writing.config_of(found))
    except ValueError as error:
      raise ValueError(f"grpojax would refuse this config:\n{error}") from None


if __name__ == "__main__":
  main(sys.argv[1:])
