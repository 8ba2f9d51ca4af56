"""Console entry: `grpojax train ...` is `python -m grpojax.train ...`.

grpojax                  lists the programs (also: python -m grpojax)
grpojax NAME [...]       runs a program; grpojax NAME --help explains its flags
grpojax --settings       prints docs/settings.md, the settings of all programs
"""

import ast
import difflib
import importlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent


def programs() -> dict[str, str]:
  """Returns the first docstring line of each program without importing it."""
  by_name = {}
  for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("studies/*.py")]):
    text = path.read_text()
    if re.search(r"^def main\(argv\b", text, re.MULTILINE):
      name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
      by_name[name] = ast.get_docstring(ast.parse(text)).splitlines()[0]
  return by_name


_FIRST = """usage: grpojax PROGRAM [...], or python -m grpojax.PROGRAM [...]

First steps:
  grpojax train                   trains a bundled model in minutes
  grpojax evaluate runs/NAME      evaluates the model of a run
  grpojax train --help            explains all settings
"""


def usage() -> str:
  """Returns the text of --help: first steps, and a line per program."""
  by_name = programs()
  width = max(map(len, by_name))
  lines = {
    name: f"  {name:{width}}  {about}" for name, about in by_name.items()
  }
  studies = [lines.pop(name) for name in by_name if name.startswith("studies.")]
  head = [_FIRST, "The programs:", *lines.values(), ""]
  return "\n".join([*head, "The paper's experiments:", *studies])


def settings_page() -> str:
  """Returns docs/settings.md."""
  from grpojax.runtime.cli import help_text  # imports JAX

  modules = {x: importlib.import_module(f"grpojax.{x}") for x in programs()}
  return help_text.page(modules)


def main() -> None:
  """Runs the program named by the command line."""
  name, *argv = sys.argv[1:] or ["--help"]
  if name in ("-h", "--help"):
    print(usage())
    return
  if name == "--settings":
    print(settings_page())
    return
  by_name = programs()
  if name not in by_name:
    last = {program.rpartition(".")[2]: program for program in by_name}
    near = difflib.get_close_matches(name.rpartition(".")[2], last, n=1)
    known = ", ".join(by_name)
    hint = f"did you mean {last[near[0]]}?" if near else f"use {known}"
    raise SystemExit(f"error: unknown program {name!r}: {hint}")
  sys.exit(importlib.import_module(f"grpojax.{name}").main(argv))


if __name__ == "__main__":
  main()
