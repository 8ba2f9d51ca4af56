"""The README's Python snippets run as they stand."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(snippet: str, capsys) -> str:
  exec(compile(snippet, str(README), "exec"), {})
  return capsys.readouterr().out


def test_the_users_own_model_learns(capsys):
  """The first snippet prints the mean reward, which starts near 1 / 16."""
  assert float(run(SNIPPETS[0], capsys).split()[-1]) > 0.5


@pytest.mark.parametrize("snippet", SNIPPETS[1:])
@pytest.mark.slow  # each compiles its programs
def test_snippet_runs(snippet, capsys):
  assert run(snippet, capsys)
