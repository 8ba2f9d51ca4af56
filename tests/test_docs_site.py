"""The built documentation: links, pictures and formulas."""

import html.parser
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("material", reason="pip install 'grpojax[docs]'")
pytest.importorskip("mkdocstrings")
pytest.importorskip("latex2mathml")

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """Builds the site; warnings are errors."""
  path = tmp_path_factory.mktemp("site")
  words = ["build", "--quiet", "--strict", "--site-dir", str(path)]
  done = subprocess.run(
    [sys.executable, "-m", "mkdocs", *words],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return path


class _Sources(html.parser.HTMLParser):
  """Collects addresses that a browser fetches to show a page."""

  def __init__(self):
    super().__init__()
    self.addresses = []
    self.pictures = []

  def handle_starttag(self, tag, attributes):
    values = dict(attributes)
    if tag in ("script", "img") and values.get("src"):
      self.addresses.append(values["src"])
    if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
      self.addresses.append(values["href"])
    if tag == "img":
      self.pictures.append(values)


def test_pages_need_no_other_server(site):
  pages = [p for p in site.rglob("*.html") if p.name != "404.html"]
  assert len(pages) > 15
  for text in ("../grpojax/", "<!-- with "):  # the second is not merged
    assert not [p for p in pages if text in p.read_text()]
  start = (site / "getting-started" / "index.html").read_text()
  assert "Hardware:" in start  # a config's docstring
  pictures = []
  for page in pages:
    parser = _Sources()
    parser.feed(page.read_text())
    pictures += parser.pictures
    for address in parser.addresses:
      assert "//" not in address, f"{page}: {address} is on another server"
      file = page.parent / address.split("?")[0]
      assert file.exists(), f"{page}: {address}"
  assert len(pictures) >= 5 and all(p.get("alt") for p in pictures)


def test_formulas_are_mathml(site):
  for name in ("theory", "group-size", "objectives"):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
    rest, displayed = re.subn(r"(?s)\$\$.*?\$\$", "", text)
    inline = len(re.findall(r"\$[^$]+\$", rest))
    page = (site / name / "index.html").read_text()
    assert inline > 0 and page.count("<math") == displayed + inline
    assert page.count('display="block"') == displayed
    assert "arithmatex" not in page
