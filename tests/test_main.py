"""The console entry `grpojax NAME`."""

import ast
import pathlib
import sys

import pytest

import grpojax
from grpojax import __main__ as entry
from grpojax import compile as compile_program

PACKAGE = pathlib.Path(grpojax.__file__).parent
INNER = ("__main__", "rewards.worker", "environments.worker")
INNER += ("runtime.text.trial",)


@pytest.fixture
def call(monkeypatch):
  """Calls the console entry with arguments."""

  def run(*words):
    monkeypatch.setattr(sys, "argv", ["grpojax", *words])
    entry.main()

  return run


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_usage_lists_every_program_with_its_first_line(call, words, capsys):
  call(*words)
  programs = capsys.readouterr().out.partition("The programs:")[2]
  lines = [line for line in programs.splitlines() if line.startswith("  ")]
  expected = {}
  for path in PACKAGE.rglob("*.py"):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    text = path.read_text()
    inner = name.startswith("examples.") or name in INNER
    if not inner and '\nif __name__ == "__main__":' in text:
      about = ast.get_docstring(ast.parse(text))
      expected[name] = about.partition("\n")[0]
  assert dict(line.split(maxsplit=1) for line in lines) == expected


@pytest.mark.parametrize(
  "name, hint",
  [
    ("trian", "did you mean train?"),
    ("Evaluate", "did you mean evaluate?"),
    ("mse", "did you mean studies.mse?"),
    ("--config=gsm8k", "use bench, chat, compile, evaluate"),
    ("training", "did you mean train?"),  # a package, not a program
  ],
)
def test_unknown_programs_get_a_suggestion(call, name, hint):
  with pytest.raises(SystemExit) as stopped:
    call(name, "--help")
  message = stopped.value.code
  assert message.startswith(f"error: unknown program {name!r}: {hint}")
  assert "\n" not in message


def test_arguments_and_exit_codes_are_passed_on(call, monkeypatch):
  got = []
  monkeypatch.setattr(
    compile_program, "main", lambda argv: got.append(argv) or 3
  )
  with pytest.raises(SystemExit) as stopped:
    call("compile", "--out", "x")
  assert stopped.value.code == 3 and got == [["--out", "x"]]


@pytest.mark.parametrize(
  "words, quiet",
  [
    (["-m", "grpojax"], True),
    (["-m", "grpojax.train"], True),
    (["/usr/bin/grpojax", "train"], True),
    (["-m", "grpojaxes"], False),
    (["/home/me/train.py", "grpojax"], False),
    ([], False),
  ],
)
def test_ctrl_c_ends_programs_in_one_line(monkeypatch, words, quiet):
  monkeypatch.setattr(sys, "orig_argv", ["python", *words])
  monkeypatch.setattr(sys, "argv", words[words[:1] == ["-m"] :])
  assert grpojax._is_program() is quiet
