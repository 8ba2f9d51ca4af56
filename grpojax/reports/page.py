"""Builds the page of a report from a template, a style, scripts and data.

A completion may be `</script><script>...`. Data are therefore JSON in an inert
block that they cannot close, and scripts insert them only as text. A
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
  """Returns the hash that allows a script or style in the policy."""
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def page(title: str, data: Any) -> str:
  """Returns the self-contained HTML page that shows `data` of JSON types."""
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
  # A single pass: placeholders in inserted values must stay text.
  pieces = read("page.html").split("@@")
  pieces[1::2] = [values[name] for name in pieces[1::2]]
  return "".join(pieces)
