"""Accuracy and pass@k of model directories and of runs."""

import errno
import json
import re
import shutil

import numpy as np
import pytest

from grpojax import evaluate
from grpojax.core.decoding.sampling import Sampling
from grpojax.runtime.files import records
from grpojax.training.config import default_config, from_config
from grpojax.training.data import prompts, splits
from grpojax.training.evaluation import evaluation
from grpojax.training.policy import load_policy
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib


def result_of(argv, tmp_path):
  """What `evaluate` writes for `argv`, without the model's name."""
  out = tmp_path / "result.json"
  evaluate.main([*argv, f"--out={out}"])
  result = json.loads(out.read_text())
  assert f"--model={result.pop('model')}" in argv
  return result


def recorded(run, step):
  rows = records.read_jsonl(run / "metrics.jsonl")
  names = ("accuracy", "accuracy_low", "accuracy_high")
  return next(
    {name: row[name] for name in names}
    for row in rows
    if row["step"] == step and "accuracy" in row
  )


@pytest.mark.slow
def test_a_model_directory(toy_run, toy_model, toy_task, tmp_path, capsys):
  settings = toy_task.arguments(toy_model, evaluate.READS)
  before = result_of([f"--model={toy_model}", *settings], tmp_path)
  assert before == recorded(toy_run.directory, 0)
  exported = toy_run.directory / "model"
  after = result_of([f"--model={exported}", *settings], tmp_path)
  assert after == recorded(toy_run.directory, 8) != before
  assert "greedy accuracy  100.0%" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_evaluated_under_its_own_config(
  toy_run, toy_task, tmp_path, capsys
):
  run = tmp_path / "run"
  shutil.copytree(toy_run.directory, run)

  def files():
    return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}

  before = files()
  assert result_of([f"--model={run}"], tmp_path) == recorded(run, 8)
  # As it was before its last two steps.
  shutil.rmtree(run / "checkpoints" / "8")
  (run / "summary.json").unlink()
  assert result_of([f"--model={run}"], tmp_path) == recorded(run, 6)
  printed = capsys.readouterr().out
  assert re.findall("checkpoint of step .", printed) == [
    "checkpoint of step 8",
    "checkpoint of step 6",
  ]
  assert files().items() <= before.items()
  # An override still wins.
  override = ["--config.eval.num_prompts=4"]
  result = result_of([f"--model={run}", *override], tmp_path)
  assert result["accuracy_low"] < recorded(run, 6)["accuracy_low"]
  # Without checkpoints there is the finished model, under the same config.
  shutil.rmtree(run / "checkpoints")
  shutil.copy(toy_run.directory / "summary.json", run)
  assert result_of([f"--model={run}"], tmp_path) == recorded(run, 8)


def completions(policy, batch_size, toy, group_size=1, temperature=0.0):
  config = default_config()
  words = (word.split("=") for word in toy.arguments(""))
  for name, value in words:
    if name.startswith(("--config.data", "--config.sampling")):
      path = name.removeprefix("--config.")
      config.update_from_flattened_dict({path: int(value)})
  config.eval.num_prompts = 10
  config.eval.batch_size = batch_size
  settings = from_config(config)
  examples = splits.load_examples(settings, "test")
  sampling = Sampling(temperature)
  with rewards_lib.open_reward_pool(settings) as reward_pool:
    return evaluation.evaluate(
      settings,
      policy,
      policy.params,
      sampling_lib.make_sampler(settings, policy, group_size, sampling),
      prompts.held_out(settings, policy, examples),
      reward_pool,
      step=0,
    )


@pytest.mark.slow
def test_the_batch_size_changes_nothing(toy_model, toy_task):
  policy = load_policy(str(toy_model))
  whole = completions(policy, 10, toy_task)
  parts = completions(policy, 4, toy_task)  # the last batch holds two
  assert whole.rewards.shape == parts.rewards.shape == (10, 1)
  np.testing.assert_array_equal(whole.rewards, parts.rewards)
  assert whole.texts == parts.texts and whole.examples == parts.examples
  drawn = completions(policy, 5, toy_task, group_size=8, temperature=1.0)
  assert drawn.texts[:5] != drawn.texts[5:]  # batches draw other samples
  assert [e["prompt"] for e in whole.examples] == [
    toy_task.load("test")[i]["prompt"] for i in range(10)
  ]


@pytest.mark.slow
def test_samples(toy_model, toy_task, tmp_path, capsys):
  settings = toy_task.arguments(toy_model, evaluate.READS, eval__num_prompts=30)
  argv = [f"--model={toy_model}", "--samples=8", "--k=1,4", *settings]
  result = result_of(argv, tmp_path)
  assert result.keys() == {"pass@1", "pass@4"}
  # The model was taught to write 7 with probability 0.3.
  low, high = result["pass@1"][1:]
  assert 0.15 < low < 0.4 < high + 0.15
  assert result["pass@1"][0] < result["pass@4"][0] <= 1
  assert "pass@4  " in capsys.readouterr().out
  assert result_of(argv, tmp_path) == result


def held_out_prompts(monkeypatch):
  """Records the problems of every evaluation: prompt and answer."""
  seen, original = [], evaluation.evaluate

  def recording(*args, **kwargs):
    result = original(*args, **kwargs)
    seen.append([(e["prompt"], e["answer"]) for e in result.examples])
    return result

  monkeypatch.setattr(evaluation, "evaluate", recording)
  return seen


@pytest.mark.slow
def test_compare_before_and_after_training(
  toy_run, toy_model, toy_task, tmp_path, capsys, monkeypatch
):
  seen = held_out_prompts(monkeypatch)
  exported = toy_run.directory / "model"
  settings = toy_task.arguments(toy_model, evaluate.READS)
  argv = [f"--model={exported}", f"--compare={toy_model}", *settings]
  result = result_of(argv, tmp_path)
  after, before = recorded(toy_run.directory, 8), recorded(toy_run.directory, 0)
  assert result.pop("compare") == {"model": str(toy_model)} | before
  difference = result.pop("difference")["accuracy"]
  assert result == after
  assert seen[0] == seen[1] and len(seen[0]) == 10
  # Ten prompts, all wrong before and all right after.
  assert (before["accuracy"], after["accuracy"]) == (0, 1)
  assert difference["difference"] == 1
  assert difference["p_value"] == pytest.approx(2 / 2**10)
  assert 0.5 < difference["low"] < difference["high"] == 1
  lines = [x.rstrip() for x in capsys.readouterr().out.splitlines()]
  header, row = lines[-2:]
  for name, start in [
    ("model", "100.0%"),
    ("compare ", "0.0%"),
    ("model - compare", "+100.0%  [+"),
    (" p", " 0.002"),
  ]:
    assert row[header.index(name) :].startswith(start), (header, row)


@pytest.mark.slow
def test_compare_samples_of_a_run_under_the_first_config(
  toy_run, toy_model, toy_task, tmp_path, capsys, monkeypatch
):
  """The second model's data settings are not used."""
  seen = held_out_prompts(monkeypatch)
  run = tmp_path / "run"
  shutil.copytree(toy_run.directory, run)
  settings = toy_task.arguments(
    toy_model, evaluate.READS, eval__num_prompts=30, data__max_prompt_length=9
  )
  samples = ["--samples=8", "--k=1,4", "--majority"]
  argv = [f"--model={toy_model}", f"--compare={run}", *samples, *settings]
  result = result_of(argv, tmp_path)
  assert seen[0] == seen[1] and len(seen[0]) == 30
  names = {"pass@1", "pass@4", "maj@1", "maj@4"}
  other, difference = result.pop("compare"), result.pop("difference")
  assert other.pop("model") == str(run)
  assert result.keys() == other.keys() == difference.keys() == names
  for name, value in difference.items():
    assert value["difference"] == pytest.approx(
      result[name][0] - other[name][0], abs=1e-6
    )
    assert value["low"] < value["difference"] < value["high"]
  # One answer's vote is the answer; four of a model that mostly answers 3
  # outvote a 7, and it is the other way round after training.
  assert result["maj@1"][0] == pytest.approx(result["pass@1"][0])
  assert result["maj@4"][0] < result["pass@1"][0] < result["pass@4"][0]
  assert other["maj@4"][0] > other["pass@1"][0] > result["pass@4"][0] - 0.3
  assert (
    difference["maj@4"]["high"] < 0 and difference["maj@4"]["p_value"] < 0.01
  )
  assert f"{run}: checkpoint of step 8" in capsys.readouterr().out
  # On its own, the second model gives the same numbers: nothing leaks.
  alone = [f"--model={run}", *samples, *settings]
  assert result_of(alone, tmp_path) == other


@pytest.mark.slow
def test_a_model_compared_with_itself_in_another_format(
  toy_model, toy_task, tmp_path, monkeypatch
):
  """The second model's own chat template writes its prompts."""
  chat = tmp_path / "chat"
  shutil.copytree(toy_model, chat)
  template = "{{ messages[0]['content'].removesuffix('+1') + '\\n' }}"
  (chat / "chat_template.jinja").write_text(template)
  settings = toy_task.arguments(
    toy_model, evaluate.READS, data__template="{prompt}+1\n"
  )
  argv = [f"--model={toy_model}", f"--compare={chat}", *settings]
  result = result_of(argv, tmp_path)
  plain = toy_task.arguments(toy_model, evaluate.READS)
  alone = result_of([f"--model={toy_model}", *plain], tmp_path)
  result["compare"].pop("model")
  assert result["compare"] == alone
  # A format that makes the prompts too long is refused before any sampling.
  (chat / "chat_template.jinja").write_text("Please, add: " + template)
  monkeypatch.setattr(evaluation, "evaluate", None)
  with pytest.raises(SystemExit, match="prompts are never cut: raise it"):
    evaluate.main(argv)


def longer_for_threes(model, path):
  """The model again: a prompt with 3+ is longer for it, all others fit."""
  shutil.copytree(model, path)
  template = """
    {%- set sum = messages[0]["content"].rstrip("\n") -%}
    {{- "= = " + sum if "3+" in sum else sum[-4:] }}{{ "\n" -}}
  """
  (path / "chat_template.jinja").write_text(template)
  return path


@pytest.mark.slow
def test_compared_on_what_fits_both(
  toy_model, toy_task, tmp_path, capsys, monkeypatch
):
  """Sums of five characters are too long for one, 3+ for the other."""
  seen = []

  def asked(settings, policy, params, sampler, batches, *_, **__):
    examples = [e for _, batch in batches for e in batch]
    seen.append([(e["prompt"], e["answer"]) for e in examples])
    rewards = np.zeros((len(examples), 2), np.float32)
    texts = [["", ""]] * len(examples)
    return evaluation.Evaluation(rewards, texts, examples, rewards)

  monkeypatch.setattr(evaluation, "evaluate", asked)
  other = longer_for_threes(toy_model, tmp_path / "other")
  problems = [toy_task.load("test", size=40)[i]["prompt"] for i in range(40)]
  long, threes = (
    {i for i, p in enumerate(problems) if is_dropped(p)}
    for is_dropped in (lambda p: len(p) == 5, lambda p: "3+" in p)
  )
  assert long - threes and threes - long  # neither drops what the other does
  fits = [p for i, p in enumerate(problems) if i not in long | threes]
  argv = [f"--model={toy_model}", f"--compare={other}"]
  settings = toy_task.arguments(
    toy_model,
    evaluate.READS,
    eval__num_prompts=40,
    data__max_prompt_length=5,
    data__too_long="drop",
  )
  samples = ["--samples=2", "--k=2", *settings]
  result_of(argv + samples, tmp_path)
  assert seen[0] == seen[1] == [(prompt, "7") for prompt in fits]
  printed = capsys.readouterr().out
  assert f"{toy_model}: {len(long)} held-out prompts are too long" in printed
  assert f"{other}: {len(threes)} held-out prompts are too long" in printed
  assert f"compared on the {len(fits)} held-out prompts that fit b" in printed


@pytest.mark.parametrize(
  "sums, text",
  [("12+34 3+4", "no held-out prompt fits both"), ("12+34 3+4 5+4", "needs 2")],
)
def test_too_few_fit_both(
  sums, text, toy_model, toy_task, tmp_path, monkeypatch
):
  """Said before anything is sampled."""
  monkeypatch.setattr(evaluation, "evaluate", None)
  rows = [{"prompt": prompt, "answer": "7"} for prompt in sums.split()]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "test.jsonl").write_text(lines)
  other = longer_for_threes(toy_model, tmp_path / "other")
  settings = toy_task.arguments(
    toy_model, evaluate.READS, data__max_prompt_length=5, data__too_long="drop"
  )
  settings += ["--config.data.name=jsonl", f"--config.data.path={tmp_path}"]
  argv = [f"--model={toy_model}", f"--compare={other}", "--samples=2"]
  with pytest.raises(SystemExit, match=text):
    evaluate.main(argv + settings)


@pytest.mark.slow
def test_numbers_are_printed_whatever_the_disk_says(
  toy_model, toy_task, tmp_path, monkeypatch, capsys
):
  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "result.json")

  argv = [f"--model={toy_model}", f"--out={tmp_path / 'result.json'}"]
  argv += toy_task.arguments(toy_model, evaluate.READS)
  with monkeypatch.context() as patch:  # nor is the screen needed to write
    patch.setattr(evaluate, "_report", None)
    with pytest.raises(TypeError):
      evaluate.main(argv)
  assert "accuracy" in json.loads((tmp_path / "result.json").read_text())
  monkeypatch.setattr(records, "write_json", full)
  with pytest.raises(SystemExit, match="error: result.json: No space left"):
    evaluate.main(argv)
  assert "greedy accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
  "words, text",
  [
    ([], "--model"),
    (["--model=arithmetic-bose"], "no model at 'arithmetic-bose'"),
    (["--model={model}", "--samples=2", "--k=1,3"], "1..2"),
    (["--model={model}", "--k=one"], "numbers like 1,2,4"),
    (["--model={empty_run}"], "no complete checkpoint"),
    (["--model={model}", "--config.reward.functions=nosuch"], "'nosuch'"),
    (["--model={model}", "--majority"], "--majority need --samples"),
    (["--model={model}", "--majority", "--samples=1001"], "--samples=1000"),
    (
      [
        "--model={model}",
        "--majority",
        "--samples=4",
        "--config.reward.functions=length",
      ],
      "the problems are judged by length",
    ),
    (["--model={model}", "--out={empty_run}"], "is a directory"),
    (
      ["--model={model}", "--config.sampling.max_new_tokens=1020"],
      "(data.max_prompt_length) and a completion of 1020",
    ),
    (
      ["--model={model}", "--config.model.path=x"],
      "--config.model.path: this program reads only "
      "its own flags and seed, steps, model.dtype, model.ignore_keys, data.*, "
      "environment.*, "
      "reward.*, eval.",
    ),
    (["--model={model}", "--sampling.temperature=0"], "mean --temperature?"),
    (
      ["--model={model}", "--optim.learning_rate=1"],
      "reads only its own flags",
    ),
    (["--model={model}", "--temperature=1e-9"], "must be in [0.01, 100]"),
    (
      ["--model={empty_run}", "--model.dtype=bfloat16"],
      "reads only its own flags",
    ),
    (
      ["--model={model}", "--samples=1000000000"],
      "Change --config.eval.batch_size, --s",
    ),
  ],
)
def test_mistakes(words, text, toy_run, toy_model, tmp_path, monkeypatch):
  empty = tmp_path / "run"
  (empty / "checkpoints").mkdir(parents=True)
  shutil.copy(toy_run.directory / "config.json", empty)
  paths = {"model": toy_model, "empty_run": empty}
  monkeypatch.setattr(evaluation, "evaluate", None)  # nothing is sampled
  with pytest.raises(SystemExit) as caught:
    evaluate.main([word.format(**paths) for word in words])
  message = caught.value.code
  assert message.startswith("error: ") and text in message
  assert "\n" not in message
