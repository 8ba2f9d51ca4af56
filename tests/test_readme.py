"""The README's Python runs as it stands, and it is short.

`tests/test_docs.py` reads its commands, names and links with those of docs/.
"""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
def test_the_users_own_model_learns(capsys):
  """The snippet prints the mean reward, which starts near 1 / 16."""
  (snippet,) = SNIPPETS  # another one needs a test of its own
  exec(compile(snippet, str(README), "exec"), {})
  assert float(capsys.readouterr().out.split()[-1]) > 0.5


def test_it_is_short():
  """The rest is in docs/."""
  assert TEXT.count("\n") <= 120


def test_figures_are_those_of_the_guides():
  """Rows of figures stand in two places, and are the same in both."""
  guide = (README.parent / "docs" / "performance.md").read_text()
  rows = re.findall(r"^\| (\w+)[^|\n]*\|(.* = \d.*)$", TEXT, re.MULTILINE)
  assert len(rows) == 5
  for name, figures in rows:
    assert f"| {name} |{figures}" in guide, name
  start = (README.parent / "docs" / "getting-started.md").read_text()
  for figure in re.findall(r"\d+\.\d%(?: \[.*?\])?", TEXT.replace("\n", " ")):
    assert figure in start, figure
