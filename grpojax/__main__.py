"""The programs by name: `grpojax train ...` is `python -m grpojax.train ...`.

grpojax                  lists the programs (also: python -m grpojax)
grpojax NAME [...]       runs one; grpojax NAME --help says what it takes
grpojax --settings       docs/settings.md: the settings of all of them
"""

import ast
import difflib
import importlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent


def programs() -> dict[str, str]:
  """First lines of the docstrings of all modules with a `main`, by name.

  Those are the files beside this one and the studies; nothing is imported.
  """
  found = {}
  for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("studies/*.py")]):
    text = path.read_text()
    if re.search(r"^def main\(argv\b", text, re.MULTILINE):
      name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
      found[name] = ast.get_docstring(ast.parse(text)).splitlines()[0]
  return found


def usage() -> str:
  """The programs, a line each."""
  found = programs()
  width = max(map(len, found))
  lines = [f"  {name:{width}}  {line}" for name, line in found.items()]
  head = "usage: grpojax PROGRAM [...]; grpojax PROGRAM --help says more"
  return "\n".join([head, "", *lines])


def settings_page() -> str:
  """docs/settings.md."""
  from grpojax.runtime import settings_page  # takes JAX, which a list does not

  modules = {
    name: importlib.import_module(f"grpojax.{name}") for name in programs()
  }
  return settings_page.page(modules)


def _unknown(name: str, found: dict[str, str]) -> str:
  """The error for a program that does not exist, with the nearest that does."""
  last = {program.rpartition(".")[2]: program for program in found}
  near = difflib.get_close_matches(name.rpartition(".")[2], last, n=1)
  hint = f"did you mean {last[near[0]]}?" if near else f"use {', '.join(found)}"
  return f"error: unknown program {name!r}: {hint}"


def main() -> None:
  """Runs the program that the command line names, with the rest of it."""
  name, *argv = sys.argv[1:] or ["--help"]
  if name in ("-h", "--help"):
    print(usage())
    return
  if name == "--settings":
    print(settings_page())
    return
  found = programs()
  if name not in found:
    raise SystemExit(_unknown(name, found))
  sys.exit(importlib.import_module(f"grpojax.{name}").main(argv))


if __name__ == "__main__":
  main()
