"""The page that lists all settings."""

import importlib
import pathlib
import re

from grpojax import __main__ as entry
from grpojax.runtime.cli import settings
from grpojax.runtime.cli.settings import Section

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_lists_every_setting_once():
  page = entry.settings_page()
  rows = re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)
  for name in entry.programs():
    program = importlib.import_module(f"grpojax.{name}")
    names = {f"--{flag}" for flag in program.FLAGS}
    if not name.startswith("studies."):
      declared = program.SETTINGS or Section("", {})
      names |= {path for path, _ in settings.flat_settings(declared)}
    assert names <= {*rows}, names - {*rows}
  # Studies list only the training settings that they change.
  assert "train.optim.learning_rate" in rows
  assert "train.optim.b1" not in rows and "sft.rows" not in rows
  assert "train.data.options.difficulty" in rows and "predict.batch" in rows
  # To update: python -m grpojax --settings > docs/settings.md.
  assert (ROOT / "docs" / "settings.md").read_text() == page + "\n"
