"""Declarations of settings, and the page that lists them."""

import importlib
import pathlib
import re

import pytest
from ml_collections import ConfigDict

from grpojax import __main__ as entry
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.cli.config import flatten
from grpojax.runtime.cli.settings import Section, free_section, section, setting

ROOT = pathlib.Path(__file__).resolve().parents[2]
TREE = section(
  "all",
  size=setting(8, "of it", within="[1, inf)", words=("auto",)),
  kind=setting("a", "which", ("a", "b")),
  part=section(
    "a part",
    rate=setting(0.5, "how much", within="[0, 1)"),
    options=free_section("any"),
  ),
)


def test_defaults_become_a_config():
  config = settings_lib.to_config(TREE)
  assert flatten(config) == {"size": 8, "kind": "a", "part.rate": 0.5} | (
    flatten(ConfigDict({"part": {"options": {}}}))
  )
  config.part.options.new = 1  # takes any key
  with pytest.raises(AttributeError):
    config.part.other = 1
  config.size = "auto"  # a word instead of a number
  other = settings_lib.changed(TREE, {"part.rate": 0.25})
  other = settings_lib.to_config(other)
  assert other.part.rate == 0.25 and config.part.rate == 0.5
  with pytest.raises(TypeError):
    config.kind = 1


def test_the_page_lists_every_setting_once():
  page = entry.settings_page()
  rows = re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)
  for name in entry.programs():
    program = importlib.import_module(f"grpojax.{name}")
    names = {f"--{flag}" for flag in program.FLAGS}
    if not name.startswith("studies."):
      declared = program.SETTINGS or Section("", {})
      names |= {path for path, _ in settings_lib.flat_settings(declared)}
    assert names <= {*rows}, names - {*rows}
  # Studies list only the training settings that they change.
  assert "train.optim.learning_rate" in rows
  assert "train.optim.b1" not in rows and "sft.rows" not in rows
  assert "train.data.options.difficulty" in rows and "predict.batch" in rows
  # To update: python -m grpojax --settings > docs/settings.md.
  assert (ROOT / "docs" / "settings.md").read_text() == page + "\n"
