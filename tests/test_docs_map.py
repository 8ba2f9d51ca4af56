"""The map and the tables of docs/ name what there is, and nothing else."""

import pathlib
import re

import pytest

from grpojax.models import huggingface as hf
from grpojax.rewards import functions
from grpojax.training.config import CHOICES

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETTINGS = (DOCS / "settings.md").read_text()
# What is written by hand: settings.md is generated.
GUIDES = "\n".join(
  page.read_text()
  for page in sorted(DOCS.glob("*.md"))
  if page.name != "settings.md"
)


def section(title, page="development.md"):
  text = (DOCS / page).read_text()
  return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def mapped():
  """The folders of the map below grpojax/, and the programs beside them."""
  folders, programs, parents = [], [], []
  inside = False
  for line in section("Map").split("```")[1].splitlines()[1:]:
    name, depth = line.split()[:1], (len(line) - len(line.lstrip())) // 2
    if depth == 0:
      inside = name == ["grpojax/"]
    elif inside and name[0].endswith("/"):
      parents = [*parents[: depth - 1], name[0]]
      folders.append("".join(parents))
    elif inside:
      programs += re.findall(r"\w+\.py", line.partition("  the ")[0])
  return folders, programs


def test_the_map_has_every_folder_and_every_program_once():
  package = ROOT / "grpojax"
  folders = {
    f"{path.parent.relative_to(package)}/"
    for path in package.rglob("*.py")
    if path.parent != package
  } | {"assets/"}
  programs = {path.name for path in package.glob("*.py")}
  in_map = mapped()
  assert sorted(in_map[0]) == sorted(folders)
  assert sorted(in_map[1]) == sorted(programs - {"__init__.py", "__main__.py"})


def test_extending_names_files_and_dicts_that_exist():
  rows = [x for x in section("Extending").splitlines() if x.startswith("| ")]
  assert len(rows) > 10
  text = "\n".join(rows[1:])
  for name in re.findall(
    r"`((?:core|models|data|rewards|training)/[\w/]+\.py)`", text
  ):
    assert (ROOT / "grpojax" / name).is_file(), name
  for name in re.findall(r"`(tests/[\w/]+(?:\.py|/))`", text):
    assert (ROOT / name).exists(), name
  code = "".join(p.read_text() for p in (ROOT / "grpojax").rglob("*.py"))
  for name in set(re.findall(r"\b[A-Z_]{5,}\b", text)):
    assert re.search(rf"^{name}\b", code, re.MULTILINE), name


@pytest.mark.parametrize("setting", CHOICES)
def test_every_choice_is_listed_and_explained(setting):
  """In the setting's own row, and somewhere in a guide."""
  rows = [x for x in SETTINGS.splitlines() if x.startswith(f"| `{setting}` |")]
  assert rows, setting
  for name in CHOICES[setting]:
    assert re.search(rf"\b{name}\b", rows[0]), name
    # KL estimators stand in words, without quotes.
    assert re.search(rf"\b{name}\b", GUIDES), name


def test_every_reward_and_every_family_is_named():
  rewards = section("Built in", "rewards.md")
  for name in functions.BUILT_IN:
    assert f"`{name}`" in rewards, name
  families = section("Families", "models.md")
  for name in hf.FAMILIES:
    assert f"| {name} |" in families, name
