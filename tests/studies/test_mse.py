"""The study of mean squared errors, on a model of 4,000 parameters."""

import json

import numpy as np
import pytest

from grpojax.runtime.cli.settings import to_config
from grpojax.runtime.files import records
from grpojax.statistics import u_statistics
from grpojax.studies import mse, run, samples
from grpojax.training import policies


def arguments(model, directory, **changes):
  settings = {
    "base": model,
    "instruct": model,
    "num_prompts": 2,
    "samples": 24,
    "group_sizes": "(2,4)",
    "max_new_tokens": 8,
    "shots": 1,
  }
  words = [f"--config.{key}={x}" for key, x in (settings | changes).items()]
  return [f"--run_dir={directory}", *words]


@pytest.fixture
def config():
  return to_config(mse.SETTINGS).unlock()


@pytest.mark.slow
def test_killed_study_resumes_to_the_same_results(
  toy_model, toy_task, tmp_path, capsys, monkeypatch, rows_of
):
  directory = tmp_path / "mse"
  argv = arguments(toy_model, directory)
  mse.main(argv)
  results = rows_of(directory / "results.csv")
  assert len(results) == 3 * 2 * 4
  assert [r["configuration"] for r in results[::8]] == [*samples.CONFIGURATIONS]
  assert {r["estimator"] for r in results} == {*u_statistics.Estimators._fields}
  summary = json.loads((directory / "summary.json").read_text())
  for means in summary.values():
    assert 0 < means["success"] < 1
    assert 2 <= means["distinct"] < 40  # of 48 samples, as answers are short
  # Both are the same model in plain text, with different samples.
  base, instruct = (summary[name]["success"] for name in ("base", "instruct"))
  assert base != instruct and abs(base - instruct) < 0.4
  names = ("results.csv", "summary.json", "rows.jsonl")
  texts = [(directory / name).read_text() for name in names]
  # As if killed while writing a row.
  lines = texts[-1].splitlines(keepends=True)
  (directory / "rows.jsonl").write_text("".join(lines[:3]) + lines[3][:50])
  (directory / "results.csv").unlink()
  capsys.readouterr()
  mse.main(argv)
  assert [(directory / name).read_text() for name in names] == texts
  printed = capsys.readouterr().out
  assert "prompt 4/6" in printed and "prompt 3/6" not in printed
  # A finished study only redraws.
  monkeypatch.setattr(policies, "load_policy", None)
  (directory / "mse.png").unlink()
  mse.main(argv)
  assert (directory / "mse.png").read_bytes().startswith(b"\x89PNG")


def test_theory_uses_the_second_pool(monkeypatch, config):
  """All rewards are 0 in the first pool, 1 in the second."""
  config.samples = 6
  config.group_sizes = (2,)
  scores = np.arange(12.0)[:, None]
  rewards = np.repeat(np.float32([0, 1]), 6)
  sampled = samples.Sampled(rewards, scores @ scores.T, np.empty(0), 12)
  monkeypatch.setattr(samples, "sample", lambda *args: sampled)
  bench = samples.Bench(None, [(None, [{"prompt": "1+1"}])], None, None)
  row = mse._measure(config, bench, "base", 0)
  assert row["success"] == 0.5 and row["best_baseline"] == 1
  second = row["moments"]
  total = second["vanilla_trace"] + second["gradient_sq"]
  assert total == pytest.approx(np.mean(scores[6:] ** 2))
  # The estimate is 0, so the error is the squared gradient: products of two
  # blocks' truths, which are minus their mean scores, as the baseline is 1.
  blocks = np.array([0.5, 2.5, 4.5])
  expected = (blocks.sum() ** 2 - (blocks**2).sum()) / 6
  assert row["errors"]["vanilla"] == pytest.approx(expected)


def row_of(index, error, oracle, moments, apart=0.1):
  """Returns a row with the 4 replicates value -+ `apart`."""

  def around(value):
    return (value + apart * np.array([1, -1, 1, -1])).tolist()

  values = dict.fromkeys(("vanilla", "leave_one_out", "centred"), error)
  values["oracle"] = oracle
  lengths = {"value": 0.5, "best_baseline": 0.1, "correlation": 0.0}
  return {
    "configuration": "base",
    "index": index,
    "success": 0.5,
    "distinct": 3,
    "best_baseline": 0.1,
    "errors": {k: [v] for k, v in values.items()},
    "errors_without": {k: [[x] for x in around(v)] for k, v in values.items()},
    "moments": moments,
    "moments_without": {k: around(v) for k, v in moments.items()},
    "lengths": lengths,
    "lengths_without": {k: around(v) for k, v in lengths.items()},
  }


def moments_of(*values):
  return dict(zip(u_statistics.Moments._fields, values, strict=True))


def test_table_of_known_rows():
  rows = [
    row_of(0, 5.0, 2.0, moments_of(1.0, 8.0, 16.0, 24.0)),
    row_of(1, 3.0, 2.0, moments_of(3.0, 4.0, 8.0, 12.0)),
  ]
  results = mse.table(rows, [4])
  by_name = {row["estimator"]: row for row in results}
  theory = {name: row["theory"] for name, row in by_name.items()}
  # Of the mean moments 2, 6, 12, 18 at G = 4; 9/16 * 3 + 2/16 for own means.
  assert theory == {
    "vanilla": 3.0,
    "leave_one_out": 3.0,
    "centred": 1.8125,
    "oracle": 1.5,
  }
  row = by_name["leave_one_out"]
  assert row["mse"] == 4 and row["ratio_to_oracle"] == 2
  assert row["theory_ratio"] == 2
  # Each prompt's variance is 3 * 0.01, with 3 degrees of freedom: 6 together.
  error = np.sqrt(2 * 0.03) / 2
  assert row["mse_high"] - 4 == pytest.approx(2.446912 * error, rel=1e-4)
  assert 4 - row["mse_low"] == pytest.approx(2.446912 * error, rel=1e-4)
  # leave_one_out - 2 oracle has replicates -+ 0.1, too, divided by 2.
  half = row["ratio_high"] - row["ratio_low"]
  assert half == pytest.approx(2.446912 * error, rel=1e-4)
  # At G = 4 the replicates of the theory are -+ (0.1/4 + 0.1/12).
  spread = np.hypot(error, error / 3)
  assert row["deviation"] == pytest.approx((4 - 3) / spread, rel=1e-4)
  summary = mse.summary(rows, results)["base"]
  assert summary["moments"]["remainder"]["mean"] == 18
  assert summary["largest_deviation"]["leave_one_out"] == row["deviation"]
  assert summary["prompts_with_best_baseline_below_half_value"] == 2


def test_equal_rewards_have_zero_errors(config):
  """There is no ratio to the oracle, but still a picture."""
  row = row_of(0, 0.0, 0.0, moments_of(0.0, 0.0, 0.0, 0.0), apart=0.0)
  results = mse.table([row], [2])
  assert all(r["deviation"] == r["mse_high"] == 0 for r in results)
  assert "lengths" not in mse.summary([row | {"success": 1}], results)["base"]
  config.group_sizes = (2,)
  axes = run.new_figure((4, 6)).subplots(2, 1, squeeze=False)
  mse.draw(axes, results, config)
  assert axes[0, 0].get_yscale() == "linear"


def test_questions_are_right_and_disjoint():
  held_out = samples.questions(None, "test")
  solved = samples.questions(None, "train")
  texts = {x["prompt"] for x in held_out}
  assert len(texts) == len(held_out) == 65 and len(solved) == 70
  assert not texts & {x["prompt"] for x in solved}
  for example in held_out + solved:
    expression = example["prompt"].removeprefix("What is ").removesuffix("?")
    assert eval(expression) == int(example["answer"])
  assert [x["prompt"].split()[3] for x in held_out[:5]] == list("+-*/+")


@pytest.mark.slow
def test_study_with_projected_scores(toy_model, toy_task, tmp_path, capsys):
  directory = tmp_path / "mse"
  mse.main(arguments(toy_model, directory, projections=3))
  printed = capsys.readouterr().out
  assert "prompt 6/6" in printed and "base correlation: " in printed
  for row in records.read_jsonl(directory / "rows.jsonl"):
    # A function linear in the scores' products is the mean of its replicates.
    for field in ("moments", "errors"):
      for name, value in row[field].items():
        without = np.array(row[f"{field}_projected"][name])
        assert len(without) == 3 and np.all(np.ptp(without, axis=0) > 0)
        np.testing.assert_allclose(without.mean(0), value, rtol=1e-6)
  summary = json.loads((directory / "summary.json").read_text())["base"]
  assert summary["prompts_with_equal_rewards"] == 0
  assert summary["lengths"]["value"]["mean"] == summary["success"]


QUESTION = "Question: What is 4 + 2?\nAnswer:"


@pytest.mark.parametrize(
  "problems, plain, solved, template, answer",
  [
    (
      "questions",
      QUESTION,
      "Question: What is 6 + 4?\nAnswer: 10\n\n"
      "Question: What is 7 - 2?\nAnswer: 5\n\n",
      "Q: What is 4 + 2?\nA: ",
      "it is 6.",
    ),
    (
      "expressions",
      "30+10\n",
      "0+0\n0+0=0\n#### 0\n\n1+1\n1+1=2\n#### 2\n\n",
      "Q: 30+10\nA: ",
      "#### 7",
    ),
  ],
)
def test_prompts_of_all_configurations(
  problems, plain, solved, template, answer, config, toy_task
):
  config.base = config.instruct = "arithmetic-instruct"
  config.problems = problems
  config.num_prompts = 1
  config.shots = 2
  texts = {}
  for name in samples.CONFIGURATIONS:
    bench = samples.open_bench(config, name)
    ((prompts, (example,)),) = bench.batches
    texts[name] = example["prompt_text"]
    assert prompts.prompt_mask.all()  # no padding
    assert bench.reward("", answer, example) == 1
    ends = map(bench.policy.tokenizer.decode, bench.policy.eos_ids)
    one_line = problems == "questions" and name != "instruct"
    assert ("\n" in ends) == one_line
  assert texts == {
    "base": plain,
    "instruct": template,
    "in-context": solved + plain,
  }
