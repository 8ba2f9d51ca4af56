"""The program `evaluate`, on model directories and on runs."""

import errno
import json
import re
import shutil

import numpy as np
import pytest
from run_helpers import refusal, rows_of

from grpojax import evaluate
from grpojax.core.decoding.sampling import Sampling
from grpojax.runtime.files import records
from grpojax.training.data import prompts, splits
from grpojax.training.evaluation import evaluation
from grpojax.training.policies import load_policy
from grpojax.training.step import sampling as sampling_lib
from grpojax.training.step import scoring
from grpojax.training.step.draws import Source


@pytest.fixture
def result_of(tmp_path):
  """`(model, *words)` -> the JSON of `evaluate`, without the model."""

  def result_of(model, *words):
    out = tmp_path / "result.json"
    evaluate.main([f"--model={model}", *words, f"--out={out}"])
    result = json.loads(out.read_text())
    assert result.pop("model") == str(model)
    return result

  return result_of


@pytest.fixture
def settings(toy_task):
  """`(**changes)` -> arguments of the toy task for `evaluate`."""
  return lambda **changes: toy_task.arguments("", evaluate.READS, **changes)


def recorded(run, step):
  (row,) = [x for x in rows_of(run, "accuracy") if x["step"] == step]
  return {f"accuracy{x}": row[f"accuracy{x}"] for x in ("", "_low", "_high")}


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_own_config(
  toy_run, toy_task, result_of, tmp_path, capsys
):
  run = shutil.copytree(toy_run.directory, tmp_path / "run")

  def files():
    return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}

  before = files()
  assert result_of(run) == recorded(run, 8)
  # The state before the last two steps.
  shutil.rmtree(run / "checkpoints" / "8")
  (run / "summary.json").unlink()
  assert result_of(run) == recorded(run, 6)
  printed = capsys.readouterr().out
  assert re.findall("checkpoint of step (.)", printed) == ["8", "6"]
  assert files().items() <= before.items()
  # Arguments override the run's config.
  result = result_of(run, "--config.eval.num_prompts=4")
  assert result["accuracy_low"] < recorded(run, 6)["accuracy_low"]
  # Without checkpoints the finished model is evaluated.
  shutil.rmtree(run / "checkpoints")
  shutil.copy(toy_run.directory / "summary.json", run)
  assert result_of(run) == recorded(run, 8)


@pytest.mark.slow
def test_the_batch_size_does_not_change_greedy_completions(
  toy_model, toy_task, settings_with
):
  policy = load_policy(str(toy_model))

  def completions(batch_size, group_size=1, temperature=0.0):
    settings = settings_with(
      data__max_prompt_length=8,
      sampling__max_new_tokens=8,
      eval__num_prompts=10,
      eval__batch_size=batch_size,
    )
    examples = splits.load_examples(settings, "test")
    sampling = Sampling(temperature)
    with scoring.open_reward_pool(settings) as reward_pool:
      sampler = sampling_lib.make_sampler(
        settings, policy, group_size, sampling
      )
      return evaluation.evaluate(
        settings,
        Source(policy, sampler, reward_pool),
        policy.params,
        prompts.held_out(settings, policy, examples),
        step=0,
      )

  whole = completions(10)
  parts = completions(4)  # the last batch holds two
  assert whole.rewards.shape == parts.rewards.shape == (10, 1)
  np.testing.assert_array_equal(whole.rewards, parts.rewards)
  assert whole.texts == parts.texts and whole.examples == parts.examples
  drawn = completions(5, group_size=8, temperature=1.0)
  assert drawn.texts[:5] != drawn.texts[5:]  # batches differ in their keys
  problems = [toy_task.load("test")[i]["prompt"] for i in range(10)]
  assert [e["prompt"] for e in whole.examples] == problems


@pytest.fixture
def answered(monkeypatch):
  """Prompts and answers of every evaluation."""
  seen = []
  original = evaluation.evaluate

  def recording(*args, **kwargs):
    result = original(*args, **kwargs)
    seen.append([(e["prompt"], e["answer"]) for e in result.examples])
    return result

  monkeypatch.setattr(evaluation, "evaluate", recording)
  return seen


@pytest.mark.slow
def test_compare_samples_of_a_run_under_the_first_config(
  toy_run, toy_model, settings, result_of, tmp_path, capsys, answered
):
  """The data settings of the second model are ignored."""
  run = shutil.copytree(toy_run.directory, tmp_path / "run")
  words = ["--samples=8", "--k=1,4", "--majority"]
  words += settings(eval__num_prompts=30, data__max_prompt_length=9)
  result = result_of(toy_model, f"--compare={run}", *words)
  # The model was taught to write 7 with probability 0.3.
  low, high = result["pass@1"][1:]
  assert 0.15 < low < 0.4 < high + 0.15
  assert answered[0] == answered[1] and len(answered[0]) == 30
  other = result.pop("compare")
  difference = result.pop("difference")
  assert other.pop("model") == str(run)
  names = {"pass@1", "pass@4", "maj@1", "maj@4"}
  assert result.keys() == other.keys() == difference.keys() == names
  for name, value in difference.items():
    expected = result[name][0] - other[name][0]
    assert value["difference"] == pytest.approx(expected, abs=1e-6)
    assert value["low"] < value["difference"] < value["high"]
  # The model mostly answers 3, which wins the vote of four answers; after
  # training 7 wins.
  assert result["maj@1"][0] == pytest.approx(result["pass@1"][0])
  assert result["maj@4"][0] < result["pass@1"][0] < result["pass@4"][0]
  assert other["maj@4"][0] > other["pass@1"][0] > result["pass@4"][0] - 0.3
  of_four = difference["maj@4"]
  assert of_four["high"] < 0 and of_four["p_value"] < 0.01
  printed = capsys.readouterr().out
  assert f"{run}: checkpoint of step 8" in printed
  assert re.search(r"\nmaj@4 .*%  \[.*\] .* -\d.*%  \[-.*\] ", printed)
  # Evaluated alone, the second model has the same numbers.
  assert result_of(run, *words) == other


@pytest.fixture
def other(toy_model, tmp_path):
  """The same model with a template that lengthens prompts with 3+."""
  path = shutil.copytree(toy_model, tmp_path / "other")
  template = """
    {%- set sum = messages[0]["content"].rstrip("\n") -%}
    {{- "= = " + sum if "3+" in sum else sum[-4:] }}{{ "\n" -}}
  """
  (path / "chat_template.jinja").write_text(template)
  return path


DROP = {"data__max_prompt_length": 5, "data__too_long": "drop"}


@pytest.mark.slow
def test_models_are_compared_on_prompts_that_fit_both(
  toy_model, other, toy_task, settings, result_of, capsys, monkeypatch
):
  """Sums of five characters are too long for one model, 3+ for the other."""
  seen = []

  def evaluated(settings, source, params, batches, *_, **__):
    examples = [e for _, batch in batches for e in batch]
    seen.append([(e["prompt"], e["answer"]) for e in examples])
    rewards = np.zeros((len(examples), 2), np.float32)
    texts = [["", ""]] * len(examples)
    return evaluation.Evaluation(rewards, texts, examples, rewards)

  monkeypatch.setattr(evaluation, "evaluate", evaluated)
  problems = [toy_task.load("test", size=40)[i]["prompt"] for i in range(40)]
  long = {i for i, p in enumerate(problems) if len(p) == 5}
  threes = {i for i, p in enumerate(problems) if "3+" in p}
  assert long - threes and threes - long
  fits = [p for i, p in enumerate(problems) if i not in long | threes]
  words = ["--samples=2", "--k=2", *settings(eval__num_prompts=40, **DROP)]
  result_of(toy_model, f"--compare={other}", *words)
  assert seen[0] == seen[1] == [(prompt, "7") for prompt in fits]
  printed = capsys.readouterr().out
  for model, dropped in ((toy_model, long), (other, threes)):
    text = f"{model}: {len(dropped)} held-out prompts are too long"
    assert text in printed
  assert f"compared on the {len(fits)} held-out prompts that fit b" in printed


@pytest.mark.parametrize(
  "sums, text",
  [("12+34 3+4", "no held-out prompt fits both"), ("12+34 3+4 5+4", "needs 2")],
)
def test_too_few_common_prompts_are_refused_before_sampling(
  sums, text, toy_model, other, settings, result_of, tmp_path, monkeypatch
):
  monkeypatch.setattr(evaluation, "evaluate", None)
  rows = [{"prompt": prompt, "answer": "7"} for prompt in sums.split()]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "test.jsonl").write_text(lines)
  words = settings(**DROP, data__name="jsonl", data__path=tmp_path)
  with pytest.raises(SystemExit, match=text):
    result_of(toy_model, f"--compare={other}", "--samples=2", *words)


@pytest.mark.slow
def test_results_survive_a_full_disk(
  toy_model, settings, result_of, tmp_path, monkeypatch, capsys
):
  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "result.json")

  with monkeypatch.context() as patch:  # results are written before printing
    patch.setattr(evaluate, "_report", None)
    with pytest.raises(TypeError):
      result_of(toy_model, *settings())
  assert "accuracy" in json.loads((tmp_path / "result.json").read_text())
  monkeypatch.setattr(records, "write_json", full)
  with pytest.raises(SystemExit, match="error: result.json: No space left"):
    result_of(toy_model, *settings())
  assert "greedy accuracy" in capsys.readouterr().out


OWN = "reads only its own flags"


@pytest.mark.parametrize(
  "words, text",
  [
    ("", "--model"),
    ("--model=arithmetic-bose", "no model at 'arithmetic-bose'"),
    ("MODEL --samples=2 --k=1,3", "1..2"),
    ("MODEL --k=one", "numbers like 1,2,4"),
    ("EMPTY", "no complete checkpoint"),
    ("EMPTY --best", "has no best checkpoint"),
    ("MODEL --majority", "--majority need --samples"),
    (
      "MODEL --majority --samples=4 --config.reward.functions=length",
      "the problems are judged by length",
    ),
    ("MODEL --out={empty}", "is a directory"),
    (
      "MODEL --config.sampling.max_new_tokens=1020",
      "(data.max_prompt_length) and a completion of 1020",
    ),
    (
      "MODEL --config.model.path=x",
      f"{OWN} and settings seed, steps, model.dtype,",
    ),
    ("MODEL --sampling.temperature=0", "mean --temperature?"),
    ("MODEL --temperature=1e-9", "must be in [0.01, 100]"),
    ("EMPTY --model.dtype=bfloat16", OWN),
    ("MODEL --samples=1000000000", "Change --config.eval.batch_size, --s"),
  ],
)
def test_errors_are_raised_before_sampling(
  words, text, toy_run, toy_model, tmp_path, monkeypatch
):
  empty = tmp_path / "run"
  (empty / "checkpoints").mkdir(parents=True)
  shutil.copy(toy_run.directory / "config.json", empty)
  words = words.replace("MODEL", f"--model={toy_model}")
  words = words.replace("EMPTY", f"--model={empty}").format(empty=empty)
  monkeypatch.setattr(evaluation, "evaluate", None)  # nothing is sampled
  message = refusal(evaluate, *words.split())
  assert text in message and "\n" not in message
