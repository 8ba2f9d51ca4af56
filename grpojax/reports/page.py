"""The page: a template, a style, scripts, and data that are only ever text.

A completion may be `</script><script>...`. So data are JSON in a block that no
browser runs and that no character can end, scripts put them into the page as
text, and a Content-Security-Policy allows only these scripts and this style.
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
  """Writes JSON that is safe in HTML: ASCII without <, > and &, and no NaN."""
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  for character in "<>&":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return text


def _source(text: str) -> str:
  """Hash of a script or style, as the policy allows it."""
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def page(title: str, data: Any) -> str:
  """Makes the whole page of `data` of JSON's types; it needs nothing else."""
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
  # One pass over the template: what is put in is not looked into again.
  pieces = read("page.html").split("@@")
  pieces[1::2] = [values[name] for name in pieces[1::2]]
  return "".join(pieces)
