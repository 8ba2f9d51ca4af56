"""A configuration of TRL or verl as a config file of grpojax.

    python -m grpojax.translate FILE [--out=CONFIG.py]
                                [--processes=N] [--examples=N]

FILE is TRL's GRPOConfig (YAML or JSON of its fields, or the Python script that
makes it) or verl's trainer configuration (YAML or JSON; names with dots, as on
its command line, are taken too). It is read, never run. CONFIG.py gets the
settings with the other library's names beside them, and above them what means
something else here and what has no counterpart; without --out it is printed.
TRL counts batches for each of its processes: --processes says how many there
were. Both count epochs: --examples says how many training prompts there are.

Ends with code 1 where grpojax would refuse the config, and says why.
"""

import os
import pathlib
import sys

from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.terminal.screen import printable
from grpojax.training.config import from_config
from grpojax.translation import reading, rules, trl, verl, writing
from grpojax.translation.rules import Note

FLAGS = {
  "file": setting("", "the configuration of TRL or verl"),
  "out": setting("", 'config file to write; "" = the screen'),
  "processes": setting(1, "that TRL was started with", within="[1, inf)"),
  "examples": setting(
    0, "training prompts, which epochs are counted by", within="[0, inf)"
  ),
}
SETTINGS = None
LIBRARIES = (trl.LIBRARY, verl.LIBRARY)


def translate_file(
  path: str | os.PathLike, processes: int = 1, examples: int | None = None
) -> rules.Translation:
  """Translates a file of the library that knows most of its names.

  TRL was started with so many `processes`; epochs are counted by the number of
  training examples, if it is known.

  Raises:
    ValueError: it cannot be read or translated; one line.
    OSError: it cannot be read.
  """
  source = reading.read(path)
  names = [*source.settings, *source.unread]
  counts = [sum(map(library.knows, names)) for library in LIBRARIES]
  if not any(counts):
    raise ValueError(
      "none of its names is one of TRL's GRPOConfig or of verl's trainer:"
      f" {', '.join(names[:5])}"
    )
  library = LIBRARIES[counts.index(max(counts))]
  translation = rules.translate(library, source.settings, processes, examples)
  notes = [*translation.notes]
  for name, text in source.unread.items():
    text += " is no plain value: the library's default is taken; set it"
    if note := library.table.get(name, rules.Row()).note:
      text += f" ({note})"
    notes.append(Note(name, text, missing=True))
  if own := [k for k, v in source.settings.items() if f"{path}:" in str(v)]:
    text = f"workers import {path}: what starts its training has to stand under"
    text += " `if __name__ == '__main__'`, or they in a file of their own"
    notes.append(Note(", ".join(own), text))
  return translation._replace(notes=tuple(notes))


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  program = "python -m grpojax.translate"
  with command_line.usage_errors():
    _, flags = command_line.parse(
      argv, FLAGS, SETTINGS, program, positional="file", about=__doc__
    )
    if not flags.file:
      raise ValueError("give FILE: a .yaml, .json or .py of TRL or verl")
    file, examples = pathlib.Path(flags.file), flags.examples or None
    if flags.out:
      disk.check_file(flags.out, "--out")
    translation = translate_file(file, flags.processes, examples)
    text = writing.config_file(translation, file.name)
    if flags.out:
      records.write_text(flags.out, text)
      print(f"{file} ({translation.library}) -> {flags.out}")
      for note in dict.fromkeys(translation.notes):
        means = "has no counterpart" if note.missing else "means something else"
        print(printable(f"- {note.theirs} {means}: {note.text}"))
    else:
      print(text, end="")
    try:
      from_config(writing.config_of(translation))
    except ValueError as error:
      raise ValueError(f"grpojax would refuse this config:\n{error}") from None


if __name__ == "__main__":
  main(sys.argv[1:])
