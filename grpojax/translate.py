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

import argparse
import pathlib
import sys

from grpojax.runtime import command_line, records
from grpojax.training.config import validate
from grpojax.translation import files, writing


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m grpojax.translate",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage=argparse.SUPPRESS,
    allow_abbrev=False,
  )
  parser.add_argument("file", type=pathlib.Path, help="of TRL or verl")
  parser.add_argument("--out", type=pathlib.Path, help="default: the screen")
  parser.add_argument("--processes", type=int, default=1, help="of TRL")
  parser.add_argument("--examples", type=int, help="of the training data")
  return parser


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  flags = _parser().parse_args(list(map(command_line.expand_home, argv)))
  with command_line.usage_errors():
    for name in ("processes", "examples"):
      if (value := getattr(flags, name)) is not None and value < 1:
        raise ValueError(f"--{name}={value}: must be 1 or more")
    if flags.out:
      records.check_writable(flags.out)
    library, found = files.translate(
      flags.file, flags.processes, flags.examples
    )
    text = writing.config_file(found, library, flags.file.name)
    if flags.out:
      records.write_text(flags.out, text)
      print(f"{flags.file} ({library}) -> {flags.out}")
      for title, notes in (
        ("means something else here", found.differs),
        ("has no counterpart", found.missing),
      ):
        for line in dict.fromkeys(
          f"{n.theirs} {title}: {n.text}" for n in notes
        ):
          print(f"- {line}")
    else:
      print(text, end="")
    try:
      validate(writing.config_of(found))
    except ValueError as error:
      raise ValueError(f"grpojax would refuse this config:\n{error}") from None


if __name__ == "__main__":
  main(sys.argv[1:])
