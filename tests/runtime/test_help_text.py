"""The output of --help, for every program."""

import importlib
import re

import pytest

from grpojax import __main__ as entry
from grpojax import train
from grpojax.core.options import refusal
from grpojax.runtime.cli import settings
from grpojax.runtime.cli.configs import flatten
from grpojax.runtime.cli.settings import Section, described
from grpojax.training.config import default_job


def help_of(program, capsys, *argv):
  with pytest.raises(SystemExit) as stopped:
    program.main([*argv, "--help"])
  assert stopped.value.code in (0, None), stopped.value.code
  return capsys.readouterr().out


def squeezed(text):
  """Removes whitespace, because line breaks vary."""
  return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", entry.programs())
def test_help_of_every_program_has_every_setting(name, capsys, monkeypatch):
  program = importlib.import_module(f"grpojax.{name}")
  monkeypatch.setenv("COLUMNS", "90")
  text = help_of(program, capsys)
  words = squeezed(text)
  lines = text.splitlines()
  declared = program.SETTINGS or Section("", {})
  rows = {f"--config.{k}": v for k, v in settings.flat_settings(declared)}
  rows |= {f"--{flag}": one for flag, one in program.FLAGS.items()}
  job = flatten(default_job()) if name in ("compile", "train") else {}
  for typed, one in rows.items():
    value = job.get(typed.removeprefix("--config."), one.default)
    value = settings.value_text(value)
    assert squeezed(f"{typed}={value} {described(one)}") in words, typed
    assert any(x.startswith(f"  {typed}={value}") for x in lines), typed
    assert len(one.text) > 4 and not re.search(r"\n|\.$", one.text), typed
    is_flag = typed.removeprefix("--") in program.FLAGS
    assert is_flag or refusal(one, one.default) is None, typed
  for part, one in settings.sections(declared).items():
    title = f"--config.{part}.KEY=... {one.text}"
    title = title if one.free else f"{part}: {one.text}"
    assert one.text and squeezed(title) in words, part
  assert program.__doc__.splitlines()[0] == lines[0]
  wraps = {x for x in lines if " " in x.strip()}
  wraps -= {*program.__doc__.splitlines()}
  assert max(map(len, wraps)) <= 90


def test_the_most_changed_settings_come_first(capsys):
  text = help_of(train, capsys, "--config=gsm8k")
  assert "  --config.name=gsm8k" in text
  start = text.index("The settings that most people change\n")
  names = re.findall(r"^  --config\.(\S+?)=", text[start:], re.MULTILINE)
  first = train.SETTINGS.first
  assert tuple(names[: len(first)]) == first and 10 <= len(first) <= 20
