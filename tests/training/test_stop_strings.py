"""Stop strings in runs, turns and other programs."""

import json

import pytest

from grpojax import chat, evaluate
from grpojax.runtime.files import records

AGAIN = """
def step(action, seed):
  return {"observation": "31+4", "reward": float(len(action))}

def judge(prompt, completion, example):
  return float(len(completion))
"""


@pytest.fixture
def go(train_short, tmp_path):
  """Trains a toy model, which writes "####7" or "####3"; returns samples."""

  def go(name, **changes):
    (tmp_path / "again.py").write_text(AGAIN)
    settings = {
      "sampling.max_new_tokens": 40,
      "sampling.stop": "7",
      "reward.functions": f"{tmp_path / 'again.py'}:judge,length",
      "reward.weights": "1,0",
    }
    train_short(name, **settings | changes)
    return records.read_jsonl(tmp_path / name / "samples.jsonl")

  return go


@pytest.mark.slow
def test_completions_end_before_a_stop_string(go, tmp_path, capsys):
  rows = go("whole", steps=2)
  cut = 0
  for row in rows:
    text = "".join(row["tokens"])
    if "7" in text:
      assert text == f"{row['completion']}7" and not row["truncated"]
      cut += 1
    assert "7" not in row["completion"]
    assert row["reward"] == len(row["completion"])
  assert 0.1 < cut / len(rows) < 1
  capsys.readouterr()
  whole = tmp_path / "whole"
  evaluate.main([f"--model={whole}"])
  after = json.loads((whole / "summary.json").read_text())["accuracy_after"]
  assert f"{after:.1%}" in capsys.readouterr().out
  chat.main([f"--model={whole}", "--example=0", "--samples=8"])
  printed = capsys.readouterr().out
  assert "####" in printed and "####7" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("stop, most", [("##", 0), ("###", 2)])
def test_turns_end_at_a_stop_string(stop, most, go, tmp_path):
  """A stop string never begins in the turn before."""
  changes = {"environment.path": tmp_path / "again.py", "sampling.stop": stop}
  changes |= {"environment.max_turns": 3, "environment.max_turn_tokens": most}
  changes |= {"reward.functions": "environment", "reward.weights": "1"}
  rows = go("turns", steps=1, **changes)
  turns = [x for row in rows for x in row["turns"] if x["by"] == "model"]
  hashes = [x for x in turns if x["text"] == "##"]
  assert len(hashes) > 0.6 * len(turns) > 50
  assert {x["reward"] for x in hashes} == {float(most)}
  ends = [x["text"] for x in turns if stop in x["text"]]
  assert ends == [] if most else ends == ["##"] * len(hashes)
  assert max(x["tokens"] for x in turns) <= (most or 40)
