"""Runs the code of docs/*.md: Python unchanged, commands on a tiny model.

Commands keep their own sizes, and models that the page made. `test_docs.py`
checks the unchanged commands.
"""

import importlib
import sys

import docs_blocks as lib
import pytest
from run_helpers import python

MARKS = {"fast": (), "slow": pytest.mark.slow, "long": pytest.mark.long}
MODELS = ("arithmetic-base", "arithmetic-instruct", "arithmetic-careless")
SIZES = {
  "steps": 2,
  "batch_size": 16,
  "sampling.max_new_tokens": 8,
  "logits_chunk": 64,
  "eval.num_prompts": 8,
  "eval.batch_size": 8,
}


def pages(language):
  """Pages with code of a language, marked by their schedule."""
  kind = ("python", "bash").index(language)
  return [
    pytest.param(page, marks=MARKS[lib.when(page)[kind]], id=page.name)
    for page in lib.PAGES
    if lib.runs(page, language)
  ]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("python"))
def test_python_blocks_run(page, tmp_path, monkeypatch):
  """Runs a page's blocks in order, in a single namespace."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  lib.write_files(page, tmp_path)
  for file in tmp_path.glob("*.py"):  # of the same name on another page
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
  names = {}
  for block in lib.runs(page, "python"):
    text = "\n" * block.line + block.text  # errors name the page's line
    exec(compile(text, str(page), "exec"), names)


@pytest.mark.parametrize("page", pages("bash"))
def test_commands_run(page, tmp_path, monkeypatch, toy_model, toy_task):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(lib.ROOT / "configs")
  lib.write_files(page, tmp_path)
  for block in lib.runs(page, "bash"):
    for program, *argv in lib.commands(block):
      for name in MODELS:
        argv = [a.replace(f"={name}", f"={toy_model}") for a in argv]
      run(program, sizes(program, toy_model) + argv)


def run(program, argv):
  """Runs a program in this process, which has compiled programs cached."""
  if program == "compile":  # it creates devices
    done = python("-m", f"grpojax.{program}", *argv)
    assert done.returncode == 0, done.stderr
    return
  module = importlib.import_module(f"grpojax.{program or '__main__'}")
  if not program:
    print(module.usage())
    return
  try:
    code = module.main(argv)
  except SystemExit as error:
    code = error.code
  assert not code, f"{program} {argv}: {code}"


def sizes(program, model):
  """Arguments that make a command small."""
  settings = {}
  if program in ("train", "bench", "compile"):
    settings = SIZES | {"model.path": model}
  elif program == "evaluate":
    settings = {"eval.num_prompts": 8, "eval.batch_size": 8}
  return [f"--config.{key}={value}" for key, value in settings.items()]
