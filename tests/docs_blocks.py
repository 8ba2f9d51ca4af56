"""Code blocks of docs/*.md, for tests that check and run them.

A block's language is python, bash, json or text (output, or other programs). A
block with a title is a file of that name. A block is not run if its first line
starts with `# needs`, followed by the reason. A page's blocks share a directory
and a namespace; a comment of the page has their schedule:

    <!-- python: fast, commands: long -->

fast runs in every test, slow in .ci/run, long by hand.
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
  """A code block; the title may be ""."""

  page: pathlib.Path
  line: int
  language: str
  title: str
  text: str

  @property
  def needs(self):
    """Reason not to run the block, or ""."""
    match = re.match(r"# needs (.+)\n", self.text)
    return match[1] if match else ""


def blocks(page):
  text = page.read_text()
  return [
    Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2] or "", m[3])
    for m in _FENCE.finditer(text)
  ]


def write_files(page, directory):
  """Writes the blocks with a title to files."""
  for block in blocks(page):
    if block.title:
      path = directory / block.title
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(block.text)


def runs(page, language):
  """Blocks of a page to run."""
  return [
    b
    for b in blocks(page)
    if b.language == language and not b.needs and not b.title
  ]


def when(page):
  """Schedules of a page's Python and commands, or None."""
  match = _WHEN.search(page.read_text())
  return (match[1], match[2]) if match else None


def prose(page):
  """A page without its code blocks."""
  return _FENCE.sub("", page.read_text())


def commands(block):
  """[program, *arguments] of each of our commands in a bash block."""
  ours = []
  for line in lines(block):
    words = shlex.split(line, comments=True)
    for i, word in enumerate(words[1:], 1):
      match = re.fullmatch(r"grpojax(?:\.([\w.]+))?", word)
      if match and words[i - 1] == "-m":
        ours.append([match[1] or "", *words[i + 1 :]])
  return ours


def lines(block):
  """Commands of a bash block, a line each, without comments."""
  commands = block.text.replace("\\\n", " ").splitlines()
  return [x for x in commands if x.strip() and not x.startswith("#")]
