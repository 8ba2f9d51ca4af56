"""The README's Python and numbers; `test_docs.py` checks commands and links."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
def test_the_snippet_learns(capsys):
  """The snippet prints the mean reward, initially about 1 / 16."""
  (snippet,) = SNIPPETS
  exec(compile(snippet, str(README), "exec"), {})
  assert float(capsys.readouterr().out.split()[-1]) > 0.5


def test_numbers_equal_those_of_the_guides():
  guide = (README.parent / "docs" / "performance.md").read_text()
  rows = re.findall(r"^\| (\w+)[^|\n]*\|(.* = \d.*)$", TEXT, re.MULTILINE)
  assert len(rows) == 5
  for name, figures in rows:
    assert f"| {name} |{figures}" in guide, name
  start = (README.parent / "docs" / "getting-started.md").read_text()
  for figure in re.findall(r"\d+\.\d%(?: \[.*?\])?", TEXT.replace("\n", " ")):
    assert figure in start, figure
