"""Translates a configuration of TRL or verl into a config file of grpojax.

    python -m grpojax.translate FILE [--out=CONFIG.py]
                                [--yaml=CONFIG.yaml]
                                [--processes=N] [--examples=N]

FILE is TRL's GRPOConfig (YAML or JSON of its fields, or the Python script that
creates it) or verl's trainer configuration (YAML or JSON, also with the dotted
names of its command line). The program reads FILE but never runs it. CONFIG.py
begins with a list of settings that differ in meaning or have no counterpart;
comments name the original settings. Without --out, the config is printed.
Reward functions, tools and environments of a script are copied to
CONFIG_functions.py with all code they use. If the script has a TrlParser, give
its YAML file by --yaml. Finally the command that starts training is printed,
with flags for missing settings. Set --processes because TRL counts batches per
process, and --examples because both libraries count epochs.

The exit code is 1 if grpojax would refuse the config; the reason is printed.
"""

import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from grpojax.data.jsonl import unique_keys
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.terminal.screen import printable
from grpojax.training.config import from_config
from grpojax.translation import rules, script, trl, verl, writing
from grpojax.translation.rules import Note, Origin

FLAGS = {
  "file": setting("", "configuration of TRL or verl"),
  "out": setting("", 'config file to write; "" = print it'),
  "yaml": setting("", "YAML file read by the script's TrlParser"),
  "processes": setting(1, "number of TRL's processes", within="[1, inf)"),
  "examples": setting(0, "training prompts; 0 = unknown", within="[0, inf)"),
}
SETTINGS = None
LIBRARIES = (trl.LIBRARY, verl.LIBRARY)

MAX_BYTES = 2**20
MAX_VALUES = 5000  # keys of a file, items of a list
SUFFIXES = (".yaml", ".yml", ".json", ".py")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read_file(
  path: str | os.PathLike,
  parsed: Mapping[str, Any] = {},
  code: pathlib.Path | None = None,
) -> script.Source:
  """Reads a YAML, JSON or Python file; `script.read` explains the arguments.

  ValueError, with a single line, if it is not a configuration.
  """
  path = pathlib.Path(path)
  suffix = path.suffix.lower()
  if suffix not in SUFFIXES:
    raise ValueError(f"{path}: use a file ending in {', '.join(SUFFIXES)}")
  if path.stat().st_size > MAX_BYTES:
    raise ValueError(f"{path} has over {MAX_BYTES} bytes: not a configuration")
  try:
    text = path.read_text(encoding="utf-8-sig")
    if suffix == ".py":
      source = script.read(text, path, parsed, code)
      return source._replace(settings=_flatten(source.settings))
    if suffix == ".json":
      tree = json.loads(text, object_pairs_hook=unique_keys)
    else:
      tree = yaml.load(text, _UniqueKeys)
    return script.Source(_flatten(tree))
  except SyntaxError as error:
    raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
  except (ValueError, RecursionError, MemoryError, yaml.YAMLError) as error:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    raise ValueError(f"{path} cannot be read: {reason}") from error


class _UniqueKeys(yaml.SafeLoader):
  """YAML loader that refuses repeated keys."""

  def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
    node = super().compose_mapping_node(anchor)
    lines: dict[str, int] = {}
    for key, _ in node.value:
      line = key.start_mark.line + 1
      if isinstance(key, yaml.ScalarNode) and key.value != "<<":
        if first := lines.get(key.value):
          raise ValueError(
            f"line {line}: the key {key.value!r} is also in line {first}: "
            "remove one"
          )
        lines[key.value] = line
    return node


def _number_or_text(value: Any) -> Any:
  """Converts texts such as "1e-6", which YAML leaves as text, to numbers."""
  if not (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
    return value
  text = value.strip()
  return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)


def _flatten(tree: Any) -> dict[str, Any]:
  """Returns {"a.b": 1} for {"a": {"b": 1}}; ValueError for too many keys.

  Counts repeated visits too, because YAML's aliases can grow exponentially.
  """
  if not isinstance(tree, Mapping):
    raise ValueError(f"must have keys and values, not {type(tree).__name__}")
  flat: dict[str, Any] = {}
  waiting = [("", tree)]
  visits = 0
  while waiting:
    path, value = waiting.pop()
    visits += 1
    if visits > MAX_VALUES:
      raise ValueError(f"more than {MAX_VALUES} keys: not a configuration")
    if path in flat:
      raise ValueError(f"{path!r} is set twice, nested and dotted: remove one")
    if isinstance(value, Mapping) and (value or not path):
      prefix = f"{path}." if path else ""
      waiting += reversed([(f"{prefix}{k}", item) for k, item in value.items()])
    elif isinstance(value, list | tuple):
      flat[path] = [
        "..." if isinstance(x, list | Mapping) else _number_or_text(x)
        for x in value[:MAX_VALUES]
      ]
    else:
      flat[path] = _number_or_text(value)
  return flat


def translate_file(
  path: str | os.PathLike,
  processes: int = 1,
  examples: int | None = None,
  yaml: str | os.PathLike = "",
  code: pathlib.Path | None = None,
) -> rules.Translation:
  """Translates a file of TRL or verl, whichever knows more of its settings.

  `yaml` is the file that a script's TrlParser reads, `code` the file to which
  the script's functions will be copied. ValueError, with a single line, if the
  file cannot be translated.
  """
  parsed = read_file(yaml).settings if yaml else {}
  source = read_file(path, parsed, code)
  names = [*source.settings, *source.unread]
  counts = [sum(map(library.knows, names)) for library in LIBRARIES]
  if not any(counts) and not source.notes:
    raise ValueError(
      "the file has no setting of TRL's GRPOConfig or verl's trainer, only: "
      f"{', '.join(names[:5])}"
    )
  library = LIBRARIES[counts.index(max(counts))]
  origin = Origin(library, source.settings, processes, examples, source.unread)
  translation = rules.translate(origin)
  notes = [*translation.notes]
  notes += [Note(name, text, missing=True) for name, text in source.notes]
  in_script = [k for k, v in source.settings.items() if f"{path}:" in str(v)]
  if in_script:
    text = f"workers import {path}: put the code that starts training under"
    text += " `if __name__ == '__main__'`, or set --out to copy the functions"
    notes.append(Note(", ".join(in_script), text))
  return translation._replace(notes=tuple(notes), code=source.code)


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    _, flags = command_line.parse(
      argv, FLAGS, SETTINGS, __doc__, positional="file"
    )
    if not flags.file:
      raise ValueError("give FILE: a .yaml, .json or .py file of TRL or verl")
    file = pathlib.Path(flags.file)
    code = None
    if flags.out:
      disk.check_file(flags.out, "--out")
      out = pathlib.Path(flags.out)
      code = out.with_name(f"{out.stem}_functions.py")
      if any(x.exists() and x.samefile(file) for x in (out, code)):
        raise ValueError(f"--out={out} would overwrite {file}: use another")
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
        print(f"functions -> {code}: read them before you run them")
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
