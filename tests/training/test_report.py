"""Reports of intact and damaged run directories."""

import html
import json
import os
import re

import pytest
from reports import made_up

from grpojax import report as program
from grpojax.runtime.files import records
from grpojax.training.report import run_report


@pytest.fixture
def run(tmp_path):
  return made_up.make_run(tmp_path / "one")


def data_of(text):
  """The JSON data of a page."""
  match = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
  return json.loads(match[1])


def shown(*paths, **options):
  return data_of(run_report.report(paths, **options))


def test_a_report_has_the_data_of_its_run(run):
  data = shown(run)
  (one,) = data["runs"]
  assert one["name"] == "one" and one["status"] == "step 60 of 60"
  assert not one["finished"] and one["notes"] == []
  metrics = [json.loads(x) for x in (run / "metrics.jsonl").open()]
  rewards = [row["reward_mean"] for row in metrics if "reward_mean" in row]
  curve = one["curves"]["reward_mean"]
  assert curve["x"] == list(range(1, 61))
  assert curve["y"] == pytest.approx(rewards, rel=1e-4)
  low, size = (
    [row[name] for row in metrics if name in row][-1]
    for name in ("accuracy_low", "optimal_group_size")
  )
  lows = one["curves"]["accuracy"]["low"]
  assert lows[-1] == pytest.approx(low, abs=1e-4)
  assert one["groupSize"]["best"] == pytest.approx(size, abs=1e-3)
  assert one["rewards"]["total"] == 60 * 64
  assert one["failures"]["counts"] == [[*made_up.HOSTILE[:2], 1]]
  texts = {s["completion"] for g in one["groups"] for s in g["samples"]}
  assert texts == set(made_up.HOSTILE) and len(one["groups"]) == 12
  assert one["gain"]["prompts"] == 60 and one["gain"]["difference"] > 0.5
  speed = {"name": "seconds_step", "median": 1.25, "share": 1.0}
  assert one["speed"][-1] == speed and data["compared"] == []
  (one,) = shown(run, finished=True)["runs"]
  assert one["finished"] and one["status"] == "finished, 60 of 60 steps"


def test_runs_and_settings_are_compared_with_the_first(run, tmp_path):
  worse = made_up.make_run(tmp_path / "two", seed=1, better=0.2)
  data = shown(run, worse, run)
  assert [one["name"] for one in data["runs"]] != ["one", "two", "one"]
  against, itself = data["compared"]
  names = [one["metric"] for one in against["steps"]]
  assert names[0] == "reward_mean" and "seconds_step" in names
  assert against["steps"][0]["high"] < 0
  assert [e["step"] for e in against["heldOut"]] == list(range(0, 61, 10))
  assert against["heldOut"][-1]["high"] < 0
  assert itself["steps"][0]["difference"] == 0
  # Different settings come first, then changed settings.
  rows = data["settings"]
  assert [row["name"] for row in rows if row["differs"]] == ["seed"]
  first = [row["name"] for row in rows[:4]]
  assert first == ["seed", "model.path", "name", "steps"]
  assert rows[0]["values"] == ["0", "1", "0"] and rows[0]["default"] == "0"
  assert rows[1]["values"][0] == repr(made_up.HOSTILE[0])
  assert not any(row["changed"] for row in rows[4:])
  assert any(row["name"] == "optim.learning_rate" for row in rows[4:])


def test_samples_beyond_the_budget_are_not_parsed(run, monkeypatch):
  rows, about = run_report.read_samples(run / "samples.jsonl", [], 10**9)
  assert len(rows) == 48 and about == {"steps": 6, "kept_steps": 6}
  parsed = []
  parse = records.json_object
  spy = lambda x: parsed.append(x) or parse(x)
  monkeypatch.setattr(records, "json_object", spy)
  size = (run / "samples.jsonl").stat().st_size
  fit, about = run_report.read_samples(run / "samples.jsonl", [], size * 3 // 4)
  assert about == {"steps": 6, "kept_steps": 4} and len(parsed) == 32
  assert fit == [row for row in rows if row["step"] in (10, 20, 40, 60)]


def test_broken_lines_are_ignored_and_counted(run):
  before = shown(run)["runs"][0]
  with (run / "metrics.jsonl").open("a") as file:
    file.write("not json\n[1]\n" + "[" * 100_000 + "\n")
    file.write('{"step": 61, "reward_mean": NaN, "loss": Infinity}\n')
    file.write('{"step": 62, "reward_me')  # being written
  with (run / "samples.jsonl").open("a") as file:
    file.write('[1]\n{"step": 10, \n')
    file.write('{"step": 10, "prompt": "half')
  (one,) = shown(run)["runs"]
  assert one["notes"] == ["metrics.jsonl: 3 broken lines were ignored"]
  assert one["curves"] == before["curves"]
  assert one["groups"] == before["groups"]
  assert one["status"] == "step 61 of 60"


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  ["samples", "rewards", "evaluations", "failures", "metrics", "config"],
)
def test_a_missing_or_damaged_file_affects_its_part_only(run, name):
  (path,) = run.glob(f"{name}.*")
  for text in (None, b"\xff\x00\n[]", b'{"model": 3}\n'):
    path.unlink() if text is None else path.write_bytes(text)
    (one,) = shown(run)["runs"]
    assert bool(one["curves"]) == (name != "metrics")
    assert bool(one["groups"]) == (name != "samples")
    assert bool(one["gain"]) == (name != "evaluations")
    assert bool(one["rewards"]) == (name != "rewards")


def test_a_directory_without_a_run_is_refused(tmp_path):
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
  for words, text in (
    ([], "error: give the directory"),
    (["--out=x.html"], "error: give the directory"),
    ([tmp_path], "error: no run at .*: give the run dir"),
    ([tmp_path / "model"], "error: no run at"),
    ([tmp_path / "missing"], "error: no run at .*missing"),
  ):
    with pytest.raises(SystemExit, match=text):
      program.main([*map(str, words)])
  assert os.listdir(tmp_path) == ["model"]


@pytest.mark.slow
def test_the_program_writes_to_its_out_file(run, tmp_path, monkeypatch, capsys):
  program.main([str(run)])
  text = (run / "report.html").read_text()
  assert data_of(text)["runs"][0]["name"] == "one"
  assert html.escape("one - grpojax") in text
  assert str(run / "report.html") in capsys.readouterr().out
  monkeypatch.chdir(tmp_path)
  other = made_up.make_run(tmp_path / "two", steps=10)
  program.main(["one", "two"])
  assert len(data_of((tmp_path / "report.html").read_text())["runs"]) == 2
  program.main(["--out", "three.html", str(other), "one"])
  names = data_of((tmp_path / "three.html").read_text())["runs"]
  assert [one["name"] for one in names] == ["two", "one"]
  text = "--out=.*nowhere/x.html cannot be written"
  with pytest.raises(SystemExit, match=text):
    program.main(["one", "--out=nowhere/x.html"])


def test_links_are_followed_only_if_named_by_out(run, tmp_path):
  mine = tmp_path / "mine"
  link = tmp_path / "link"
  mine.write_text("mine")
  for path in (run / "report.html", link):
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
  program.main([str(run)])
  assert mine.read_text() == "mine"
  report = (run / "report.html").read_text()
  assert not (run / "report.html").is_symlink()
  program.main([str(run), f"--out={link}"])
  assert link.is_symlink() and mine.read_text() == report


def test_a_failed_report_does_not_end_the_run(run, capsys, monkeypatch):
  (run / "report.html").mkdir()
  run_report.write(run)
  assert "report.html was not written: " in capsys.readouterr().out
  monkeypatch.setattr(run_report, "report", lambda *_, **__: 1 / 0)
  run_report.write(run)
  message = "report.html was not written: ZeroDivisionError: division by zero\n"
  assert capsys.readouterr().out == message
  assert not list(run.glob(".*tmp"))
