"""The built documentation: links, pictures and formulas."""

import re

import pytest
from run_helpers import ROOT, python

pytest.importorskip("material", reason="pip install 'grpojax[docs]'")
pytest.importorskip("mkdocstrings")
pytest.importorskip("latex2mathml")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """Builds the site; warnings are errors."""
  path = tmp_path_factory.mktemp("site")
  words = "-m mkdocs build --quiet --strict --site-dir".split()
  done = python(*words, path, cwd=ROOT)
  assert done.returncode == 0, done.stderr
  return path


def tags_of(page):
  """Yields the name and the attributes of each tag of a page."""
  for name, text in re.findall(r"<(\w+)([^<>]*)>", page.read_text()):
    yield name, dict(re.findall(r'([\w-]+)="([^"]*)"', text))


def test_pages_need_no_other_server(site):
  pages = [p for p in site.rglob("*.html") if p.name != "404.html"]
  assert len(pages) > 15
  for text in ("../grpojax/", "<!-- with "):  # the second is not merged
    assert not [p for p in pages if text in p.read_text()]
  start = (site / "getting-started" / "index.html").read_text()
  assert "Hardware:" in start  # a config's docstring
  pictures = []
  for page in pages:
    addresses = []  # fetched by a browser to show the page
    for name, values in tags_of(page):
      if name in ("script", "img") and values.get("src"):
        addresses.append(values["src"])
      if values.get("rel") in ("stylesheet", "icon", "preload"):
        addresses.append(values["href"])
      if name == "img":
        pictures.append(values)
    assert addresses
    for address in addresses:
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
