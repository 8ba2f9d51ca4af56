"""The README's map and tables name what there is, and nothing else."""

import pathlib
import re

import pytest

from grpojax.models import hf
from grpojax.rewards import functions
from grpojax.training import validation

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def section(title):
  return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def mapped():
  """The Python files of the map, below grpojax/."""
  folder, files = "", []
  for line in section("Map").split("```")[1].splitlines():
    if not line.startswith(" "):
      folder = None if line.split()[:1] != ["grpojax/"] else ""
    elif re.match(r"  \w+/ ", line):
      folder = line.split()[0]
    if folder is not None:
      place = "" if line.startswith("  train.py") else folder
      files += [place + name for name in re.findall(r"\w+\.py", line)]
  return files


def test_the_map_has_every_file_once():
  package = ROOT / "grpojax"
  files = {
    str(path.relative_to(package))
    for path in package.rglob("*.py")
    if path.name != "__init__.py"
  }
  found = mapped()
  assert sorted(found) == sorted(files)


def test_extending_names_files_and_dicts_that_exist():
  rows = [x for x in section("Extending").splitlines() if x.startswith("| ")]
  assert len(rows) > 10
  text = "\n".join(rows[1:])
  for name in re.findall(
    r"`((?:core|models|data|rewards|training)/\w+\.py)`", text
  ):
    assert (ROOT / "grpojax" / name).is_file(), name
  for name in re.findall(r"`(tests/[\w/]+(?:\.py|/))`", text):
    assert (ROOT / name).exists(), name
  code = "".join(p.read_text() for p in (ROOT / "grpojax").rglob("*.py"))
  for name in set(re.findall(r"\b[A-Z_]{5,}\b", text)):
    assert re.search(rf"^{name}\b", code, re.MULTILINE), name


@pytest.mark.parametrize("setting", validation.CHOICES)
def test_the_settings_table_has_every_choice(setting):
  # KL estimators stand in words, without quotes.
  text = README if setting == "data.name" else section("Settings")
  for name in validation.CHOICES[setting]:
    assert re.search(rf"\b{name}\b", text), name


def test_every_reward_and_every_family_is_named():
  text = section("Train your own model")
  for name in (*functions.BUILT_IN, *hf.FAMILIES):
    assert f"`{name}`" in text or f"| {name} |" in text, name
