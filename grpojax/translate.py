"""Translates a configuration of TRL or verl to a config file of grpojax.

    python -m grpojax.translate FILE [--out=CONFIG.py]
                                [--yaml=CONFIG.yaml]
                                [--processes=N] [--examples=N]

FILE is TRL's GRPOConfig (YAML or JSON of its fields, or the Python script that
makes it) or verl's trainer configuration (YAML or JSON, also with the dotted
names of its command line). It is read, never run. CONFIG.py gets the settings
next to the other library's names, after a list of settings with a different
meaning or without a counterpart; without --out it is printed. Reward functions,
tools and environments of a script go to a file next to CONFIG.py, with the code
they use. A script with a TrlParser needs its --yaml. The last output is the
command that trains, with flags for missing settings. TRL counts batches per
process: --processes is their number. Both libraries count epochs: --examples is
the number of training prompts.

Exit code 1: grpojax would refuse the config; the message says why.
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
from grpojax.translation.rules import Note, Theirs

FLAGS = {
  "file": setting("", "configuration of TRL or verl"),
  "out": setting("", 'config file to write; "" = the screen'),
  "yaml": setting("", "YAML file for the script's TrlParser"),
  "processes": setting(1, "number of TRL's processes", within="[1, inf)"),
  "examples": setting(0, "number of training prompts", within="[0, inf)"),
}
SETTINGS = None
LIBRARIES = (trl.LIBRARY, verl.LIBRARY)


def translate_file(
  path: str | os.PathLike,
  processes: int = 1,
  examples: int | None = None,
  yaml: str | os.PathLike = "",
  code: pathlib.Path | None = None,
) -> rules.Translation:
  """Translates a file of the library that has most of its names.

  `yaml` is the file for a script's TrlParser, `code` the argument of
  `script.read`; other arguments are fields of `rules.Theirs`. ValueError with a
  single line if the file cannot be translated.
  """
  parsed = reading.read(yaml).settings if yaml else {}
  source = reading.read(path, parsed, code)
  names = [*source.settings, *source.unread]
  counts = [sum(map(library.knows, names)) for library in LIBRARIES]
  if not any(counts) and not source.notes:
    raise ValueError(
      f"no name of TRL's GRPOConfig or verl's trainer: {', '.join(names[:5])}"
    )
  library = LIBRARIES[counts.index(max(counts))]
  theirs = Theirs(library, source.settings, processes, examples, source.unread)
  translation = rules.translate(theirs)
  notes = [*translation.notes]
  notes += [Note(name, text, missing=True) for name, text in source.notes]
  if in_script := [
    k for k, v in source.settings.items() if f"{path}:" in str(v)
  ]:
    text = f"workers import {path}: start its training under `if __name__ == "
    text += "'__main__'`, or use the separate file of --out=CONFIG.py"
    notes.append(Note(", ".join(in_script), text))
  return translation._replace(notes=tuple(notes), code=source.code)


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  with command_line.usage_errors():
    _, flags = command_line.parse(
      argv, FLAGS, SETTINGS, __doc__, positional="file"
    )
    if not flags.file:
      raise ValueError("give FILE: a .yaml, .json or .py of TRL or verl")
    file = pathlib.Path(flags.file)
    code = None
    if flags.out:
      disk.check_file(flags.out, "--out")
      out = pathlib.Path(flags.out)
      code = out.with_name(f"{out.stem}_functions.py")
      if any(x.exists() and x.samefile(file) for x in (out, code)):
        raise ValueError(f"--out={out} would overwrite {file}: give another")
    translation = translate_file(
      file, flags.processes, flags.examples or None, flags.yaml, code
    )
    text = writing.config_file(translation, file.name)
    if code is None:
      print(text, end="")
    else:
      records.write_text(flags.out, text)
      print(f"{file} ({translation.library}) -> {flags.out}")
      if translation.code:
        disk.check_file(str(code), "--out")
        records.write_text(str(code), translation.code)
        print(f"its functions -> {code}: review them before you run them")
      for line in writing.screen_lines(translation):
        print(printable(line))
    try:
      from_config(writing.config_of(translation))
    except ValueError as error:
      raise ValueError(f"grpojax would refuse this config:\n{error}") from None
    if code:
      print(f"\n{writing.command(translation, flags.out)}")


if __name__ == "__main__":
  main(sys.argv[1:])
