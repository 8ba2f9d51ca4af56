"""Names in the documentation exist: commands, settings, files, links.

`tests/test_docs_run.py` runs its code; `mkdocs build --strict` builds it.
"""

import ast
import importlib
import importlib.util
import re

import docs_blocks as lib
import pytest

from grpojax.models import huggingface as hf
from grpojax.rewards import functions
from grpojax.runtime.cli import command_line, configs
from grpojax.runtime.cli.settings import flat_settings, free_sections
from grpojax.training import config as train_config
from grpojax.training.config import from_config

ids = lambda page: page.name
every_page = pytest.mark.parametrize("page", lib.PAGES, ids=ids)
every_text = pytest.mark.parametrize("page", [*lib.PAGES, lib.README], ids=ids)
README = lib.README.read_text()
PACKAGE = lib.ROOT / "grpojax"
CODE = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
SETTINGS = configs.flatten(train_config.default_config())
SECTIONS = {name.split(".")[0] for name in SETTINGS if "." in name}
CHOICES = {
  name: option.choices
  for name, option in flat_settings(train_config.SETTINGS)
  if option.choices
}
# Sections with free keys.
FREE = tuple(free_sections(train_config.SETTINGS))
# Pages with tables of other libraries' names and ours.
THEIRS = ("from-trl.md", "from-verl.md")
# Programs with the config of a training run.
TRAINING = ("train", "compile", "evaluate", "bench")


class _Accepted(BaseException):
  """Raised when a program has parsed its command line."""


@pytest.fixture
def accept(monkeypatch):
  """Runs a program until it has parsed its command line; returns its config.

  None for a program without a config, and for --help.
  """
  parse = command_line.parse

  def stop(*args, **kwargs):
    raise _Accepted(parse(*args, **kwargs)[0])

  monkeypatch.setattr(command_line, "parse", stop)

  def run(program, *argv):
    module = importlib.import_module(f"grpojax.{program}")
    try:
      module.main(list(argv))
    except _Accepted as accepted:
      return accepted.args[0]
    except SystemExit as error:
      if error.code:
        raise
      return None  # --help
    raise AssertionError(f"{program} parsed no command line")

  return run


@every_page
def test_every_block_has_a_language_and_a_schedule(page):
  text = page.read_text()
  blocks = lib.blocks(page)
  assert 2 * len(blocks) == text.count("```"), "unknown fence"
  for block in blocks:
    where = f"{page.name}:{block.line}"
    assert block.language in lib.LANGUAGES, where
    assert block.language != "json" or block.title, f"{where}: a file's name?"
    if block.title.endswith(".py"):
      others = "".join(b.text for b in blocks if b != block)
      name = block.title.removesuffix(".py")
      assert re.search(rf"\b{name}\b", others), f"{where}: nothing reads it"
    if block in lib.runs(page, "bash"):  # tests run only our commands
      ours = lib.commands(block)
      assert len(ours) == len(lib.lines(block)), f"{where}: # needs ...?"
  if any(lib.runs(page, language) for language in ("python", "bash")):
    assert {*lib.when(page)} <= {"fast", "slow", "long"}


@every_text
def test_commands_are_accepted(page, accept, tmp_path, monkeypatch):
  """Command lines and configs are valid; models and data are not read."""
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
  """A page's prose without other libraries' names.

  On pages about them, names of ours are in the second column of tables.
  """
  text = lib.prose(page)
  if page.name == "settings.md":  # generated
    return ""
  if page.name in THEIRS:
    rows = [x.split("|") for x in text.splitlines() if x.startswith("| ")]
    text = "\n".join(row[2] for row in rows)
  return text


@every_text
def test_settings_and_their_values_exist(page):
  """Checks each `section.key` and `setting=value` in prose."""
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
  """Metrics, functions and options in prose are words of the code."""
  examples = " ".join(b.text for b in lib.blocks(page))
  for name in set(re.findall(r"`([a-z]\w*_\w+)`", ours(page))):
    stem = re.sub(r"_(low|high|se|mean|std|max|min)$", "", name)
    known = re.search(rf"\b({name}|{stem})\b", CODE + examples)
    assert known, f"{page.name}: {name}"


@every_text
def test_files_and_tests_exist(page):
  """Checks paths, modules of the API reference and names of tests."""
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
  """Anchors of a page's headings in mkdocs."""
  heads = re.findall(r"^#+ (.+)$", lib.prose(page), re.MULTILINE)
  heads = [re.sub(r"[^\w\s-]", "", h).strip().lower() for h in heads]
  return {re.sub(r"[-\s]+", "-", head) for head in heads}


@every_text
def test_links_exist(page):
  links = re.findall(r"\]\(([^)\s]+)\)", lib.prose(page))
  for link in links:
    if link.startswith("https://"):
      continue
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.is_file(), f"{page.name}: {link}"
    if target.suffix in (".png", ".py"):
      continue
    if page != lib.README:
      assert target.parent == lib.DOCS, f"{page.name}: {link} not in the site"
    assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation_once():
  nav = (lib.ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
  nav = nav.split("\n\n")[0]
  assert sorted(re.findall(r"[\w-]+\.md", nav)) == [p.name for p in lib.PAGES]


@pytest.mark.parametrize("page", sorted(lib.DOCS.glob("api-*.md")))
def test_the_api_reference_quotes_module_docstrings(page):
  """GitHub shows the links without mkdocstrings."""
  text = page.read_text()
  links = re.findall(r"\[`(\S+)`\]\(\.\./\1\): (.*)\n\n::: (\S+)", text)
  assert len(links) == text.count("\n::: ")
  for path, about, module in links:
    name = path.removesuffix(".py").removesuffix("/__init__")
    assert name.replace("/", ".") == module
    docstring = ast.get_docstring(ast.parse((lib.ROOT / path).read_text()))
    assert docstring.split("\n\n")[0].replace("\n", " ") == about


def section(title, page="development.md"):
  text = (lib.DOCS / page).read_text()
  return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("setting", CHOICES)
def test_every_choice_is_in_a_guide(setting):
  pages = [p for p in lib.PAGES if p.name != "settings.md"]  # it has them all
  guides = "\n".join(page.read_text() for page in pages)
  for name in CHOICES[setting]:
    assert re.search(rf"\b{name}\b", guides), name


def test_every_reward_and_model_family_is_documented():
  rewards = section("Built in", "rewards.md")
  assert [x for x in functions.BUILT_IN if f"`{x}`" not in rewards] == []
  families = section("Families", "models.md")
  assert [x for x in hf.FAMILIES if f"| {x} |" not in families] == []


@pytest.mark.slow
def test_the_model_of_the_readme_learns(capsys):
  """The snippet prints the mean reward, which starts near 1 / 16."""
  # Another one needs a test of its own.
  (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  exec(compile(snippet, str(lib.README), "exec"), {})
  assert float(capsys.readouterr().out.split()[-1]) > 0.5


def test_the_readme_is_short():
  assert README.count("\n") <= 120


def test_figures_of_the_readme_are_those_of_the_guides():
  """Rows of figures stand in two places, and are the same in both."""
  guide = (lib.DOCS / "performance.md").read_text()
  rows = re.findall(r"^\| (\w+)[^|\n]*\|(.* = \d.*)$", README, re.MULTILINE)
  assert len(rows) == 4
  for name, figures in rows:
    assert f"| {name} |{figures}" in guide, name
  start = (lib.DOCS / "getting-started.md").read_text()
  for figure in re.findall(r"\d+\.\d%(?: \[.*?\])?", README.replace("\n", " ")):
    assert figure in start, figure
