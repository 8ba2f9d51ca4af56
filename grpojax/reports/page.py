"""Builds the page from a template, a style, scripts and data.

A completion may be `</script><script>...`, so data are only ever text: JSON in
an inert block that its characters cannot close, inserted as text by scripts. A
Content-Security-Policy allows only these scripts and this style.
"""

import base64
import hashlib
import html
import json
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).parent / "page"
SCRIPTS = ("basics", "charts", "overview", "tables", "completions", "main")


def embedded(data: Any) -> str:
  """Returns JSON that is safe in HTML: ASCII without <, > and &, and no NaN."""
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  for character in "<>&":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return text


def _source(text: str) -> str:
  """Returns the hash of a script or style for the policy."""
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def page(title: str, data: Any) -> str:
  """Returns the self-contained page for `data` of JSON types."""
  read = lambda name: (HERE / name).read_text(encoding="utf-8")
  style = read("style.css")
  parts = "\n".join(read(f"{name}.js") for name in SCRIPTS)
  script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
  policy = (
    f"default-src 'none'; script-src {_source(script)}; "
    f"style-src {_source(style)}; img-src data:; base-uri 'none'; "
    "form-action 'none'"
  )
  values = {
    "POLICY": html.escape(policy),
    "TITLE": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
    "STYLE": style,
    "DATA": embedded(data),
    "SCRIPT": script,
  }
  # A single pass, so that placeholders in inserted values stay text.
  pieces = read("page.html").split("@@")
  pieces[1::2] = [values[name] for name in pieces[1::2]]
  return "".join(pieces)
