"""Settings as they are declared, and the page that lists them."""

import importlib
import math
import pathlib

import pytest
from ml_collections import ConfigDict

from grpojax import __main__ as entry
from grpojax.runtime import settings as settings_lib
from grpojax.runtime.config import flatten
from grpojax.runtime.settings import (
  Section,
  changed,
  free_section,
  section,
  setting,
)

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


@pytest.mark.parametrize("name", entry.programs())
def test_every_setting_of_every_program_has_a_description(name):
  program = importlib.import_module(f"grpojax.{name}")
  declared = program.SETTINGS or Section("", {})
  found = dict(settings_lib.leaves(declared))
  found |= {f"--{flag}": one for flag, one in program.FLAGS.items()}
  assert found
  for path, one in found.items():
    assert len(one.text) > 4 and not one.text.endswith("."), path
    assert "\n" not in one.text, path
  for path, one in settings_lib.sections(declared).items():
    assert one.text, path


def test_defaults_become_a_config():
  config = settings_lib.to_config(TREE)
  assert flatten(config) == {"size": 8, "kind": "a", "part.rate": 0.5} | (
    flatten(ConfigDict({"part": {"options": {}}}))
  )
  config.part.options.new = 1  # takes any key
  with pytest.raises(AttributeError):
    config.part.other = 1
  config.size = "auto"  # a word in the place of a number
  with pytest.raises(TypeError):
    config.kind = 1


def test_changed_defaults():
  other = changed(TREE, {"part.rate": 0.25, "part.options.x": 3})
  config = settings_lib.to_config(other)
  assert config.part.rate == 0.25 and config.part.options.x == 3
  assert settings_lib.to_config(TREE).part.rate == 0.5
  with pytest.raises(KeyError):
    changed(TREE, {"part.rat": 0.25})


@pytest.mark.parametrize(
  "within, inside, outside, words",
  [
    ("[1, inf)", (1, 2.5, 1e300), (0, 0.999, math.inf, math.nan), "1 or more"),
    ("(0, inf)", (1e-300,), (0, -1, math.inf, math.nan), "more than 0"),
    ("[0, 1)", (0, 0.5), (1, -0.1, math.nan), "in [0, 1)"),
    ("(0, 1]", (1, 0.5), (0, 1.1, -math.inf), "in (0, 1]"),
    ("[0, 2**31)", (0, 2**31 - 1), (2**31, -1), "in [0, 2**31)"),
  ],
)
def test_intervals(within, inside, outside, words):
  assert all(settings_lib.allows(within, x) for x in inside)
  assert not any(settings_lib.allows(within, x) for x in outside)
  assert settings_lib.say(within) == words


@pytest.mark.parametrize("within", ["0, 1", "[0 1]", "[a, 1]", "[0, 1] ", ""])
def test_what_is_no_interval(within):
  with pytest.raises(ValueError):
    settings_lib.allows(within, 0.5)


def test_every_interval_and_every_default_is_one():
  for name in entry.programs():
    program = importlib.import_module(f"grpojax.{name}")
    for path, one in settings_lib.leaves(program.SETTINGS or Section("", {})):
      assert settings_lib.refusal(one, one.default) is None, path


def test_a_wrong_value_is_refused_with_the_description():
  values = {"size": 0, "kind": "c", "part.rate": 1.0}
  assert settings_lib.problems(TREE, values) == [
    "size = 0: must be 1 or more, or auto (of it)",
    "kind = 'c': use one of a, b (which)",
    "part.rate = 1.0: must be in [0, 1) (how much)",
  ]
  assert not settings_lib.problems(TREE, {"size": "auto", "part.rate": 0})


def test_the_page_is_what_the_declarations_say():
  """Write it anew: python -m grpojax --settings > docs/settings.md."""
  page = (ROOT / "docs" / "settings.md").read_text()
  assert page == entry.settings_page() + "\n"
