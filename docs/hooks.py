"""What the site takes from the repository, and formulas as MathML.

mkdocs calls these functions while it builds (see mkdocs.yml). Pages link a
picture where it lies, `../configs/x.png`, which works wherever they are read.
`<!-- docstring of FILE.py -->` stands for that file's docstring. A line that
begins with a link to FILE.py is for readers on GitHub; the site leaves it out
and shows the module's docstrings. Formulas are TeX in a page and MathML in the
site, which browsers draw without a script.
"""

import ast
import html
import pathlib
import re

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURES = ("configs/*.png", "grpojax/studies/pictures/*.png")
_DOCSTRING = r"<!-- docstring of (\S+) -->"
_SOURCE = re.compile(r"^\[`(\S+\.py)`\]\(\.\./\1\): .*\n", re.MULTILINE)
_FORMULA = re.compile(
  r"<(span|div) class=\"arithmatex\">\\([(\[])(.*?)\\[)\]]</\1>", re.DOTALL
)


def on_files(files, config):
  """Adds the repository's pictures to the site, below pictures/."""
  for pattern in PICTURES:
    for path in sorted(ROOT.glob(pattern)):
      name = f"pictures/{path.relative_to(ROOT)}"
      files.append(File.generated(config, name, abs_src_path=str(path)))
  return files


def on_page_markdown(markdown, page, config, files):
  """Pictures are where `on_files` put them; docstrings come in."""

  def docstring(match):
    text = ast.get_docstring(ast.parse((ROOT / match[1]).read_text()))
    return f"```text\n{text}\n```"

  markdown = re.sub(_DOCSTRING, docstring, _SOURCE.sub("", markdown))
  return re.sub(r"\]\(\.\./([\w/.-]+\.png)\)", r"](pictures/\1)", markdown)


def on_page_content(content, page, config, files):
  """TeX becomes MathML, and in code in tables an escaped pipe a pipe.

  A formula that cannot be read ends the build.
  """

  def formula(match):
    kind, _, tex = match.groups()
    display = "block" if kind == "div" else "inline"
    return convert(html.unescape(tex), display=display)

  pipe = lambda match: match[0].replace(r"\|", "|")
  content = re.sub(r"<code>[^<]*</code>", pipe, content)
  return _FORMULA.sub(formula, content)
