"""A configuration of TRL or verl as a config file of grpojax.

    python -m grpojax.translate FILE [--out=CONFIG.py]
                                [--yaml=CONFIG.yaml]
                                [--processes=N] [--examples=N]

FILE is TRL's GRPOConfig (YAML or JSON of its fields, or the Python script that
makes it) or verl's trainer configuration (YAML or JSON, also with the dotted
names of its command line). It is read, never run. CONFIG.py gets the settings
beside the other library's names, after a list of settings that mean something
else here or have no counterpart; without --out it is printed. Reward functions,
tools and environments of a script go into a file beside CONFIG.py, with all
that they use. A script with a TrlParser needs its --yaml. The last output is
the command that trains, with flags for missing settings.
TRL counts batches per process: --processes is their number. Both libraries
count epochs: --examples is the number of training prompts.

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
  "file": setting("", "the configuration of TRL or verl"),
  "out": setting("", 'config file to write; "" = the screen'),
  "yaml": setting("", "YAML file that the script's TrlParser is started with"),
  "processes": setting(1, "that TRL was started with", within="[1, inf)"),
  "examples": setting(
    0, "training prompts, which epochs are counted by", within="[0, inf)"
  ),
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
  """Translates a file of the library that knows most of its names.

  `yaml` is the file that a script's TrlParser reads; `code` is as of
  `script.read`, other arguments are as of `rules.Theirs`. ValueError, of one
  line, if the file cannot be translated.
  """
  parsed = reading.read(yaml).settings if yaml else {}
  source = reading.read(path, parsed, code)
  names = [*source.settings, *source.unread]
  counts = [sum(map(library.knows, names)) for library in LIBRARIES]
  if not any(counts) and not source.notes:
    raise ValueError(
      "none of its names is one of TRL's GRPOConfig or of verl's trainer:"
      f" {', '.join(names[:5])}"
    )
  library = LIBRARIES[counts.index(max(counts))]
  theirs = Theirs(library, source.settings, processes, examples, source.unread)
  translation = rules.translate(theirs)
  notes = [*translation.notes]
  notes += [Note(name, text, missing=True) for name, text in source.notes]
  if own := [k for k, v in source.settings.items() if f"{path}:" in str(v)]:
    text = f"workers import {path}: what starts its training has to stand under"
    text += " `if __name__ == '__main__'`, or they in a file of their own,"
    notes.append(Note(", ".join(own), f"{text} which --out=CONFIG.py writes"))
  return translation._replace(notes=tuple(notes), code=source.code)


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
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
        print(f"its functions -> {code}: read them before you run them")
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
