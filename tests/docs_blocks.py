"""The code blocks of docs/*.md, for the tests that read and run them.

A block's language is python, bash, json or text (which is output, or of other
programs). One with a title is a file of that name. One whose first line begins
with `# needs` is not run, and that line tells the reader why. All others are, a
page in one directory and one namespace, and a comment of the page says when:

    <!-- python: fast, commands: long -->

fast in every test, slow in .ci/run, long by hand.
"""

import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"
LANGUAGES = ("python", "bash", "json", "text")
_FENCE = re.compile(
  r"^```(\S*)(?: title=\"([\w./-]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_WHEN = re.compile(r"<!-- python: (\w+), commands: (\w+) -->")


class Block(NamedTuple):
  """A code block: its page, line, language, title ("" if none) and text."""

  page: pathlib.Path
  line: int
  language: str
  title: str
  text: str

  @property
  def needs(self):
    """What the block needs that a test has not, as its first line says."""
    found = re.match(r"# needs (.+)\n", self.text)
    return found[1] if found else ""


def blocks(page):
  text = page.read_text()
  return [
    Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2] or "", m[3])
    for m in _FENCE.finditer(text)
  ]


def write_files(page, directory):
  """Writes the blocks with a title, as the page says."""
  for block in blocks(page):
    if block.title:
      path = directory / block.title
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(block.text)


def runs(page, language):
  """The blocks of a page that are run."""
  return [
    b
    for b in blocks(page)
    if b.language == language and not b.needs and not b.title
  ]


def when(page):
  """When the page's Python and its commands are run; None if it says not."""
  found = _WHEN.search(page.read_text())
  return (found[1], found[2]) if found else None


def prose(page):
  """The page without its code blocks."""
  return _FENCE.sub("", page.read_text())


def commands(block):
  """[program, *arguments] of each of our commands in a bash block."""
  found = []
  for line in lines(block):
    words = shlex.split(line, comments=True)
    for i, word in enumerate(words[1:], 1):
      ours = re.fullmatch(r"grpojax(?:\.([\w.]+))?", word)
      if ours and words[i - 1] == "-m":
        found.append([ours[1] or "", *words[i + 1 :]])
  return found


def lines(block):
  """The commands of a bash block, a line each, without comments."""
  found = block.text.replace("\\\n", " ").splitlines()
  return [x for x in found if x.strip() and not x.startswith("#")]
