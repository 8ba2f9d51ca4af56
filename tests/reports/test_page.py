"""The page: hostile data stay data, and there are no external resources."""

import base64
import hashlib
import html.parser
import json
import re

import pytest
from reports import made_up

from grpojax.reports import metric_groups
from grpojax.reports.page import HERE, SCRIPTS, embedded, page


class Reader(html.parser.HTMLParser):
  """Collects tags with attributes, and texts of scripts, styles and titles."""

  def __init__(self):
    super().__init__()
    self.tags = []
    self.inside = None
    self.texts = []

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag in ("script", "style", "title"):
      self.inside = len(self.texts)
      self.texts.append([tag, dict(attrs).get("type"), ""])

  def handle_endtag(self, tag):
    self.inside = None

  def handle_data(self, data):
    if self.inside is not None:
      self.texts[self.inside][2] += data


def read(text):
  reader = Reader()
  reader.feed(text)
  return reader


def test_hostile_texts_are_embedded_unchanged():
  data = {"texts": list(made_up.HOSTILE), made_up.HOSTILE[0]: 1}
  text = embedded(data)
  assert text.isascii() and not re.search("[<>&\u2028\u2029]", text)
  assert json.loads(text) == data
  reader = read(page(made_up.HOSTILE[0], data))
  kinds = [(tag, kind) for tag, kind, _ in reader.texts]
  first = [("title", None), ("style", None)]
  data_kind = "application/json"
  assert kinds == [*first, ("script", data_kind), ("script", None)]
  assert json.loads(reader.texts[2][2]) == data
  assert reader.texts[0][2] == made_up.HOSTILE[0]
  plain = read(page("", {}))
  assert [tag for tag, _ in reader.tags] == [tag for tag, _ in plain.tags]
  with pytest.raises(ValueError, match="not JSON compliant"):
    embedded([float("nan")])


def test_policy_allows_only_own_scripts():
  reader = read(page("t", {}))
  (policy,) = (
    attrs["content"]
    for tag, attrs in reader.tags
    if attrs.get("http-equiv") == "Content-Security-Policy"
  )
  allowed = dict(x.strip().split(" ", 1) for x in policy.split(";"))

  def source(text):
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

  style = reader.texts[1][2]
  script = reader.texts[3][2]
  assert allowed == {
    "default-src": "'none'",
    "script-src": source(script),
    "style-src": source(style),
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
  }
  for _, attrs in reader.tags:  # styles and handlers in attributes are blocked
    assert not any(k == "style" or k.startswith("on") for k in attrs)
    for name in ("src", "href"):
      assert re.match("(data:,|#)", attrs.get(name, "#"))


def test_scripts_insert_data_only_as_text():
  for name in SCRIPTS:
    text = (HERE / f"{name}.js").read_text()
    assert text.isascii()  # any encoding works
    code = text.replace("http://www.w3.org/2000/svg", "")
    code = re.sub(r"//.*", "", code)
    dangerous = (
      r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|"
      r"Function\(|srcdoc|import\(|fetch\(|XMLHttpRequest|javascript:|http:"
    )
    assert not re.findall(dangerous, code), name
  assert {p.stem for p in HERE.glob("*.js")} == set(SCRIPTS)


def test_layout_groups_and_orders_metrics():
  names = ["zzz", "kl", "reward_mean", "accuracy", "seconds_step", "gsm/kl"]
  names += ["optimal_group_size", "own_c1", "clip_fraction_low", "c1"]
  names += ["rewards/f/mean"]
  layout = {
    group["title"]: [metric["name"] for metric in group["metrics"]]
    for group in metric_groups.layout(names)
  }
  assert layout == {
    "Learning": ["accuracy", "reward_mean"],
    "Reward functions": ["rewards/f/mean"],
    "By data set": ["gsm/kl"],
    "Policy": ["kl"],
    "Update": ["clip_fraction_low"],
    "Noise of the gradient": ["optimal_group_size", "c1", "own_c1"],
    "Speed": ["seconds_step"],
    "Other": ["zzz"],
  }

  groups = {metric_groups.part_of(name) for name in metric_groups.TITLES}
  last = len(metric_groups.GROUPS) - 1
  assert last not in groups
  assert set(metric_groups.COMPARED) <= set(metric_groups.TITLES)
