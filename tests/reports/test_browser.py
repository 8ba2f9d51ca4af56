"""The page in a real browser: it opens, can be used, and is inert."""

import json
import re
import shutil

import pytest
from reports import made_up

from grpojax.training.report import run_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
api = pytest.importorskip("playwright.sync_api")
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not BROWSER, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def browser():
  with api.sync_playwright() as playwright:
    args = ["--no-sandbox", "--disable-gpu", "--headless"]
    browser = playwright.chromium.launch(executable_path=BROWSER, args=args)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
  """A report of two hostile runs."""
  home = tmp_path_factory.mktemp("reports")
  two = [
    made_up.make_run(home / "<b>one"),
    made_up.make_run(home / "two", seed=1, better=0.5),
  ]
  with (two[1] / "metrics.jsonl").open("a") as file:
    file.write('{"step": 60, "truncated": -0.0004}\n')  # rounds to 0
  for path in two:  # adds a warning and a duplicate metric
    lines = (path / "metrics.jsonl").read_text().splitlines()
    with (path / "metrics.jsonl").open("w") as file:
      for row in map(json.loads, lines):
        if "kl" in row:
          row |= {"skipped_updates": row["step"] % 2, "a_copy": row["kl"]}
        file.write(json.dumps(row) + "\n")
  (home / "two.html").write_text(run_report.report(two))
  return (home / "two.html").as_uri()


@pytest.fixture
def wrong():
  """Messages, errors and requests of `page`."""
  return []


@pytest.fixture
def page(browser, url, wrong):
  """The opened report; checks for errors at the end."""
  with browser.new_page(viewport={"width": 1200, "height": 900}) as page:
    page.set_default_timeout(20_000)
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url))
    page.goto(url)
    assert wrong == [url]  # the only request
    wrong.clear()
    yield page
  assert wrong == []


def scroll_through(page):
  """Opens closed parts and scrolls to the end to draw everything."""
  page.evaluate(
    "document.querySelectorAll('details').forEach(d => d.open = true)"
  )
  height = page.evaluate("document.documentElement.scrollHeight")
  for top in range(0, height + 1, 800):
    page.evaluate(f"window.scrollTo({{top: {top}, behavior: 'instant'}})")
    page.evaluate(
      "new Promise(r => requestAnimationFrame(() => setTimeout(r)))"
    )


def test_hostile_texts_are_inert(page, wrong):
  scroll_through(page)
  while page.locator("#completions button").is_visible():
    page.click("#completions button")
  assert page.evaluate("window.hacked") is None
  assert page.locator("img, iframe, b b, main script").count() == 0
  text = page.evaluate("document.body.textContent")
  for hostile in made_up.HOSTILE[:2]:
    assert text.count(hostile) > 10
  assert "<b>one" in page.inner_text("#overview")
  body = page.inner_text("main")  # without the data
  assert not re.search("[\x00-\x08\x1b\u200f\u202a-\u202e\u2066-\u2069]", body)
  assert "\u27e8U+202E\u27e9dlrow" in body and "\u27e8U+001B\u27e9[31m" in body
  # The policy also stops a text that has become an element.
  page.evaluate(
    """() => {
      const node = document.createElement("script");
      node.textContent = "window.hacked = 2";
      const image = document.createElement("img");
      image.src = "http://127.0.0.1:9/x.png";
      document.body.append(node, image);
    }"""
  )
  page.wait_for_timeout(200)
  assert page.evaluate("window.hacked") is None
  refused = [x for x in wrong if "Content Security Policy" in x]
  assert len(refused) == 2
  wrong.clear()


def test_charts_tips_tables_and_warnings_are_drawn(page):
  scroll_through(page)
  charts = page.locator(".chart .plot")
  assert charts.count() >= 20
  assert page.locator(".chart .plot > svg").count() == charts.count()
  page.locator("#curves svg").nth(2).hover()
  tip = page.locator(".tip")
  assert re.match(r"step \d+\n.*one\n0\.\d+", tip.inner_text())
  page.locator("#curves svg").nth(1).focus()
  page.keyboard.press("Home")
  assert tip.inner_text().startswith("step 0\n")
  page.keyboard.press("ArrowRight")
  assert tip.inner_text().startswith("step 10\n")
  page.keyboard.press("Escape")
  assert tip.is_hidden()
  rows = page.locator("#differences tbody tr")
  assert rows.count() >= 6 and "reward_mean" in rows.first.inner_text()
  assert "seed" in page.locator("#settings tbody tr").first.inner_text()
  assert "\u2192" in page.locator("#overview .big").first.inner_text()
  trouble = page.locator("#curves details").first
  assert trouble.locator("h2").inner_text() == "Signs of trouble"
  assert trouble.locator("h3").all_inner_texts() == ["Skipped updates"]
  titles = page.locator("#curves h3").all_text_contents()
  assert len(set(titles)) == len(titles) and "a_copy" not in titles
  body = page.inner_text("#curves")
  assert "a_copy: the same as KL to the reference" in body
  verdicts = page.locator("#top .verdict").all_inner_texts()
  assert [text.partition(": ")[0] for text in verdicts] == ["<b>one", "two"]
  minus = "[\u2212-]"
  assert not re.search(f"{minus}0(\\.0+)?%", page.inner_text("main"))


def test_filters_of_completions(page):
  def count(choose):
    """Sets a filter; returns the numbers or the message on the page."""
    choose()
    page.wait_for_timeout(250)
    text = page.locator("#completions [role=status]").inner_text()
    match = re.match(r"(\d+) completions in (\d+) of", text)
    return tuple(map(int, match.groups())) if match else text

  # The last step comes first, with the worst completions on top.
  parts = page.locator("main > section").evaluate_all("x => x.map(n => n.id)")
  assert parts[:3] == ["overview", "completions", "curves"]
  assert page.locator("#completions h3").first.inner_text() == "Step 60"
  rewards = page.locator("#completions .side").first.locator(".reward")
  assert rewards.all_inner_texts() == [f"reward {x}" for x in (0, 0, 1, 1)]
  field = lambda name: page.locator(f"#completions [name={name}]")
  assert count(lambda: None) == (96, 24)  # 2 runs, 6 steps, 2 groups of 4
  step, run, low, search = map(field, ("step", "run", "low", "search"))
  assert count(lambda: step.select_option("30")) == (16, 4)
  heads = page.locator("#completions h3").all_inner_texts()
  assert heads == ["Step 30"] * 2
  assert count(lambda: run.select_option("1")) == (8, 2)
  assert page.locator(".sample").count() == 8
  assert count(lambda: low.fill("0.5")) == (4, 2)
  assert page.locator(".sample.dim").count() == 4
  cut = field("truncated")
  assert count(lambda: cut.check()) == (2, 2)
  cut.uncheck()
  low.fill("")
  assert count(lambda: search.fill("ONERROR")) == (5, 2)
  marks = page.locator("#completions mark").all_inner_texts()
  assert marks and set(marks) == {"onerror"}
  message = count(lambda: search.fill("missing text"))
  assert message == "Nothing fits these filters."
  assert page.locator(".sample").count() == 0
