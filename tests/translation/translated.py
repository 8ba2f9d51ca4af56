"""Translates configurations of other libraries, and reads the results."""

import ast
import re

from grpojax import translate
from grpojax.runtime.cli import config_file
from grpojax.runtime.cli.configs import flatten
from grpojax.training.config import default_config
from grpojax.translation import writing


def check(leaves, expected):
  """Compares settings with "name=value name=value ..."."""
  for name, value in (word.split("=", 1) for word in expected.split()):
    if not isinstance(leaves[name], str):
      value = ast.literal_eval(value)
    assert leaves[name] == value, name


def become(text, tmp_path, suffix=".yaml", **options):
  """Translates a text and loads the written config file."""
  path = tmp_path / f"theirs{suffix}"
  path.write_text(text)
  translation = translate.translate_file(path, **options)
  out = tmp_path / "ours.py"
  out.write_text(writing.config_file(translation, path.name))
  config = config_file.load_file(str(out), default_config)
  assert flatten(config) == flatten(writing.config_of(translation))
  return config, flatten(config), translation


def cases(text):
  """Reads "theirs -> ours" per line; indented lines continue a line."""
  joined = re.sub(r"\n +", " ", re.sub(r"#.*\n", "", text).strip())
  return [line.split(" -> ") for line in joined.splitlines()]
