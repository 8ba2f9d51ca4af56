"""The documentation says what is there: blocks, settings, files, links.

`tests/test_docs_run.py` runs its code; `mkdocs build --strict` builds it.
"""

import argparse
import ast
import importlib
import importlib.util
import re

import docs_blocks as lib
import pytest

from grpojax.models import huggingface as hf
from grpojax.rewards import functions
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli.settings import free_sections
from grpojax.training import config as train_config
from grpojax.training.config import CHOICES, from_config

ids = lambda page: page.name
every_page = pytest.mark.parametrize("page", lib.PAGES, ids=ids)
every_text = pytest.mark.parametrize("page", [*lib.PAGES, lib.README], ids=ids)
PACKAGE = lib.ROOT / "grpojax"
CODE = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
SETTINGS = config_lib.flatten(train_config.default_config())
SECTIONS = {name.split(".")[0] for name in SETTINGS if "." in name}
# Sections whose keys are the user's or of what they name.
FREE = tuple(free_sections(train_config.SETTINGS))
# Pages whose tables have what other libraries call it, then what it is here.
THEIRS = ("from-trl.md", "from-verl.md")
# Programs that take the config of a training run.
TRAINING = ("train", "compile", "evaluate", "bench")


class _Accepted(BaseException):
  """A program has read its command line."""


@pytest.fixture
def accept(monkeypatch):
  """Runs a program until it has read its command line; returns its config,
  None where it has none, or only wanted --help.
  """
  parse = command_line.parse

  def stop(*args, **kwargs):
    raise _Accepted(parse(*args, **kwargs)[0])

  read = argparse.ArgumentParser.parse_args

  def stop_argparse(self, args=None, namespace=None):
    read(self, args, namespace)
    raise _Accepted(None)

  monkeypatch.setattr(command_line, "parse", stop)
  monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_argparse)

  def run(program, *argv):
    module = importlib.import_module(f"grpojax.{program}")
    try:
      module.main(list(argv))
    except _Accepted as found:
      return found.args[0]
    except SystemExit as error:
      if error.code:
        raise
      return None  # --help
    raise AssertionError(f"{program} read no command line")

  return run


@every_page
def test_every_block_says_what_it_is(page):
  """None is run by accident, and none is left out without a word."""
  text, blocks = page.read_text(), lib.blocks(page)
  assert 2 * len(blocks) == text.count("```"), "a fence that is not understood"
  for block in blocks:
    where = f"{page.name}:{block.line}"
    assert block.language in lib.LANGUAGES, where
    assert block.language != "json" or block.title, f"{where}: a file's name?"
    if block.title.endswith(".py"):
      others = "".join(b.text for b in blocks if b != block)
      name = block.title.removesuffix(".py")
      assert re.search(rf"\b{name}\b", others), f"{where}: nothing reads it"
    if block in lib.runs(page, "bash"):  # nothing else can be run by a test
      ours = lib.commands(block)
      assert len(ours) == len(lib.lines(block)), f"{where}: # needs ...?"
  if any(lib.runs(page, language) for language in ("python", "bash")):
    assert {*lib.when(page)} <= {"fast", "slow", "long"}


@every_text
def test_commands_are_accepted(page, accept, tmp_path, monkeypatch):
  """All that a program can refuse before it reads a model or data."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(lib.ROOT / "configs")
  lib.write_files(page, tmp_path)
  absent = tuple(x.title for x in lib.blocks(page) if x.title and x.needs)
  for block in lib.blocks(page):
    if block.language != "bash":
      continue
    for program, *argv in lib.commands(block):
      config = accept(program, *argv) if program else None
      if config is not None and program in TRAINING:
        from_config(config)
        options = config.reward.options.to_dict()
        if not any(x.startswith(absent) for x in config.reward.functions):
          functions.resolve_all(config.reward.functions, options)


def ours(page):
  """A page's prose, without the names that other libraries have.

  Those stand in the first column of the tables of the pages about them, and
  what differs is said in bold.
  """
  text = lib.prose(page)
  if page.name == "settings.md":  # generated, of all programs
    return ""
  if page.name in THEIRS:
    rows = [x.split("|") for x in text.splitlines() if x.startswith("| ")]
    text = "\n".join(row[2] for row in rows)
  return text


@every_text
def test_settings_and_their_values_exist(page):
  """Each `section.key` and `setting=value` in prose."""
  names = re.findall(
    rf"`((?:{'|'.join(SECTIONS)})\.[\w.]+)[^`\n]*`", ours(page)
  )
  for name in names:
    known = name in SETTINGS or name.startswith(FREE)
    known |= any(key.startswith(f"{name}.") for key in SETTINGS)
    assert known, f"{page.name}: {name}"
  for name, value in re.findall(r"`([\w.]+)=([^`\s]+)`", ours(page)):
    if name in CHOICES:
      assert value in CHOICES[name], f"{page.name}: {name}={value}"
    elif "." in name:
      assert name in SETTINGS or name.startswith(FREE), f"{page.name}: {name}"


@every_text
def test_names_in_code_exist(page):
  """Metrics, functions and options that prose names are words of the code."""
  own = " ".join(b.text for b in lib.blocks(page))
  for name in set(re.findall(r"`([a-z]\w*_\w+)`", ours(page))):
    stem = re.sub(r"_(low|high|se|mean|std|max|min)$", "", name)
    found = re.search(rf"\b({name}|{stem})\b", CODE + own)
    assert found, f"{page.name}: {name}"


@every_text
def test_files_and_tests_exist(page):
  """Paths of the repository, modules of the reference, and names of tests."""
  text = lib.prose(page)
  places = "grpojax|configs|launch|tests|docs"
  for path in re.findall(rf"`((?:{places})/[\w./-]+)`", text):
    assert (lib.ROOT / path).exists(), f"{page.name}: {path}"
  for module in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
    assert importlib.util.find_spec(module), f"{page.name}: {module}"

  for path, name in re.findall(r"`(tests/[\w./]+)::(\w+)`", text):
    defined = f"def {name}(" in (lib.ROOT / path).read_text()
    assert defined, f"{page.name}: {path}::{name}"


def anchors(page):
  """The anchors of a page's headings, as mkdocs makes them."""
  heads = re.findall(r"^#+ (.+)$", lib.prose(page), re.MULTILINE)
  heads = [re.sub(r"[^\w\s-]", "", h).strip().lower() for h in heads]
  return {re.sub(r"[-\s]+", "-", head) for head in heads}


@every_text
def test_links_lead_somewhere(page):
  links = re.findall(r"\]\(([^)\s]+)\)", lib.prose(page))
  for link in links:
    if link.startswith("https://"):
      continue
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.is_file(), f"{page.name}: {link}"
    if target.suffix in (".png", ".py"):  # the site takes them out or in
      continue
    if page != lib.README:
      assert target.parent == lib.DOCS, f"{page.name}: {link} not in the site"
    assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation_once():
  nav = (lib.ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
  nav = nav.split("\n\n")[0]
  assert sorted(re.findall(r"[\w-]+\.md", nav)) == [p.name for p in lib.PAGES]


@pytest.mark.parametrize("page", sorted(lib.DOCS.glob("api-*.md")))
def test_the_reference_links_its_modules(page):
  """On GitHub too, where nothing puts docstrings into the page."""
  found = re.findall(
    r"\[`(\S+)`\]\(\.\./\1\): (.*)\n\n::: (\S+)", page.read_text()
  )
  assert len(found) == page.read_text().count("\n::: ")
  for path, text, module in found:
    name = path.removesuffix(".py").removesuffix("/__init__")
    assert name.replace("/", ".") == module
    docstring = ast.get_docstring(ast.parse((lib.ROOT / path).read_text()))
    assert docstring.split("\n\n")[0].replace("\n", " ") == text


def section(title, page="development.md"):
  text = (lib.DOCS / page).read_text()
  return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_map_has_every_folder_and_every_program_once():
  text = section("Map")
  folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
  names = [*(path.name for path in folders), "assets"]
  assert sorted(re.findall(r"^ +(\w+)/ ", text, re.MULTILINE)) == sorted(names)
  programs = {path.name for path in PACKAGE.glob("*.py")}
  in_map = re.findall(r"\w+\.py", text.partition("   the programs")[0])
  assert sorted(in_map) == sorted(programs - {"__init__.py", "__main__.py"})


def test_extending_names_files_and_dicts_that_exist():
  rows = [x for x in section("Extending").splitlines() if x.startswith("| ")]
  assert len(rows) > 10
  text = "\n".join(rows[1:])
  files = r"`((?:core|models|data|rewards|training)/[\w/]+\.py)`"
  for name in re.findall(files, text):
    assert (PACKAGE / name).is_file(), name
  for name in set(re.findall(r"\b[A-Z_]{5,}\b", text)):
    assert re.search(rf"^{name}\b", CODE, re.MULTILINE), name


@pytest.mark.parametrize("setting", CHOICES)
def test_every_choice_is_listed_and_explained(setting):
  """In the setting's own row, and somewhere in a guide."""
  table = lib.DOCS / "settings.md"  # generated; guides are written by hand
  guides = "\n".join(p.read_text() for p in lib.PAGES if p != table)
  rows = table.read_text().splitlines()
  (row,) = [x for x in rows if x.startswith(f"| `{setting}` |")][:1]
  for name in CHOICES[setting]:
    assert re.search(rf"\b{name}\b", row), name
    assert re.search(rf"\b{name}\b", guides), name


def test_every_reward_and_every_family_is_named():
  rewards = section("Built in", "rewards.md")
  assert [x for x in functions.BUILT_IN if f"`{x}`" not in rewards] == []
  families = section("Families", "models.md")
  assert [x for x in hf.FAMILIES if f"| {x} |" not in families] == []
