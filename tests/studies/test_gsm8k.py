"""The study of real text from scratch: problems, numbers, a tiny one."""

import csv
import json
import pathlib

import numpy as np
import pytest

from grpojax.data import gsm8k as gsm8k_data
from grpojax.models import huggingface as hf
from grpojax.rewards import exact, math
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli.settings import to_config
from grpojax.studies import baselines, gsm8k
from grpojax.training.run import fit
from grpojax.training.sft import sft, sft_config

PROBLEMS = str(pathlib.Path(__file__).resolve().parents[1] / "data" / "gsm8k")


def config_with(**changes):
  config = gsm8k.default_config().copy_and_resolve_references()
  config.data.path = PROBLEMS
  config.update(changes)
  return config


def test_the_default_runs_are_valid(tmp_path):
  config = config_with()
  assert gsm8k.config_errors(config) == []
  sft_config.validate(gsm8k.sft_run(config, tmp_path))
  run = gsm8k.grpo_run(config, tmp_path)
  assert run.model.path == str(tmp_path / "sft")


def test_the_shortest_problems_are_chosen_and_notes_removed(tmp_path):
  config = config_with(prompts=5)
  config.train.eval.num_prompts = 7
  gsm8k.write_problems(config, tmp_path)
  for split, count in (("train", 5), ("test", 7)):
    original = gsm8k_data.load(split, path=PROBLEMS)
    all_of_them = gsm8k_data.load(split, path=tmp_path / "texts")
    chosen = gsm8k_data.load(split, path=tmp_path / "prompts")
    assert len(all_of_them) == len(original) == 32 and len(chosen) == count
    for a, b in zip(original, all_of_them, strict=True):
      assert (a["prompt"], a["answer"]) == (b["prompt"], b["answer"])
      assert "<<" not in b["solution"]
      assert exact.exact_answer("", b["solution"], a) == 1.0

    def length(example):
      return len(example["prompt"]) + len(example["solution"])

    rest = [e for e in all_of_them if e not in list(chosen)]
    assert len(rest) == 32 - count
    assert max(map(length, chosen)) <= min(map(length, rest))


def test_only_notes_are_removed():
  text = "2*3=<<2*3=6>>6 > 1 << 8"
  assert gsm8k._NOTE.sub("", text) == "2*3=6 > 1 << 8"


def test_moving_average():
  middles, means, low, high = gsm8k.moving_average([1, 2, 3, 7], 3)
  np.testing.assert_allclose(middles, [1, 2])
  np.testing.assert_allclose(means, [2, 4])
  # Student's t with 2 degrees of freedom.
  half = 4.302653 * np.array([1, np.sqrt(7)]) / np.sqrt(3)
  np.testing.assert_allclose(high - means, half, rtol=1e-4)
  np.testing.assert_allclose(means - low, half, rtol=1e-4)


TINY = {
  "prompts": 4,
  "samples": 2,
  "sft.rows": 2,
  "sft.row_length": 400,
  "sft.vocab_size": 300,
  "sft.model.width": 8,
  "sft.model.layers": 1,
  "sft.model.mlp": 8,
  "train.steps": 2,
  "train.batch_size": 2,
  "train.group_size": 2,
  "train.data.max_prompt_length": 256,
  "train.sampling.max_new_tokens": 4,
  "train.logits_chunk": 64,
  "train.optim.micro_batches": 1,
  "train.eval.every": 2,
  "train.eval.num_prompts": 2,
  "train.eval.batch_size": 4,  # 2 prompts of 2 samples, as in training
}


def unlearned(config, out, command):
  """`sft.run` without its optimizer, which test_sft.py runs."""
  source = out.parent / "source"
  source.mkdir()
  _, params, _ = sft.start(config, source)
  hf.save(out, params, source)
  losses = [{"step": step, "loss": 6.0 - step} for step in (1, 2)]
  record = {"command": command, "seconds": 1.0, "losses": losses}
  (out / "sft.json").write_text(json.dumps(record))


@pytest.mark.slow  # a tokenizer, a model and a run
def test_a_tiny_study(tmp_path, monkeypatch, capsys):
  words = [f"--config.{key}={value}" for key, value in TINY.items()]
  study = tmp_path / "study"
  argv = [f"--config.data.path={PROBLEMS}", f"--run_dir={study}", *words]
  calls, original = [], fit.run

  def killed(settings, directory):
    calls.append("train")
    if len(calls) == 2:
      raise KeyboardInterrupt
    return original(settings, directory)

  def noted(*args):
    calls.append("sft")
    unlearned(*args)

  monkeypatch.setattr(sft, "run", noted)
  monkeypatch.setattr(fit, "run", killed)
  # Leave the session's compilation cache alone.
  monkeypatch.setattr(gsm8k.jax.config, "update", lambda *args: None)
  # What a model of no use says is the right answer, now and then.
  monkeypatch.setattr(
    math, "math_answer", lambda prompt, text, example: float(len(text) % 2)
  )
  with pytest.raises(SystemExit) as caught:
    gsm8k.main(argv)
  assert caught.value.code == 130 and not (study / "summary.json").exists()
  before = (study / "before.json").read_bytes()
  gsm8k.main(argv)
  assert calls == ["sft", "train", "train"]
  assert (study / "before.json").read_bytes() == before
  assert (study / "gsm8k.png").read_bytes().startswith(b"\x89PNG")
  with open(study / "curve.csv") as file:
    rows = list(csv.DictReader(file))
  assert [row["step"] for row in rows] == ["1", "2"]
  assert [bool(row["accuracy"]) for row in rows] == [False, True]
  summary = json.loads((study / "summary.json").read_text())
  assert summary["sft_loss"] == [5, 4]
  rewards = {
    name: json.loads((study / f"{name}.json").read_text())["rewards"]
    for name in ("before", "after")
  }
  for name, values in rewards.items():
    assert len(values) == 4 and set(values) <= {0, 0.5, 1}
    mean, low, high = summary[f"reward_{name}"]
    np.testing.assert_allclose(mean, np.mean(values), rtol=1e-6)
    assert low <= mean <= high
  np.testing.assert_allclose(
    summary["reward_difference"]["difference"],
    np.mean(rewards["after"]) - np.mean(rewards["before"]),
    atol=1e-6,
  )
  assert "held-out problems" in capsys.readouterr().out
  _its_model_can_be_studied(study, monkeypatch)


def _its_model_can_be_studied(study, monkeypatch):
  """Prompts and rewards of a pool, of the problems that are chosen."""
  shares = {"rewards": [0.0, 0.5, 1.0, 0.5]}
  (study / "before.json").write_text(json.dumps(shares))
  assert "fewer than num_prompts = 3" in baselines.gsm8k_error(str(study), 3)
  monkeypatch.chdir(study.parent)  # a relative path is one, too
  assert baselines.gsm8k_error(study.name, 2) == ""
  bench = baselines.open_gsm8k(study.name, 6, 2)
  examples = gsm8k_data.load("train", path=study / "prompts")
  assert [e["prompt"] for _, (e,) in bench.batches] == [
    examples[i]["prompt"] for i in (1, 3)
  ]
  assert bench.batches[0][0].prompt_ids.shape[0] == 1
  right = f"A note.\n#### {examples[1]['answer']}"
  rewards = bench.rewards(examples[1], [right, "#### none"])
  np.testing.assert_array_equal(rewards, [1, 0])
  config = to_config(baselines.SETTINGS)
  with config.unlocked():
    config.configurations, config.gsm8k = ("gsm8k",), study.name
    config.samples, config.num_prompts = 6, 2
  pools = baselines.collect(config, study / "pools")["gsm8k"]
  for pool in pools:
    assert pool.gram.shape == (6, 6) and (pool.lengths <= 4).all()
    assert np.linalg.eigvalsh(pool.gram).min() > -1e-4
    assert set(pool.rewards) <= {0, 1}


@pytest.fixture
def study_run(tmp_path, toy_model):
  """The directory of a run with three problems to choose, as far as needed."""
  shares = json.dumps({"rewards": [0, 0.1, 0.5, 0.95, 1, 0.9]})
  (tmp_path / "before.json").write_text(shares)
  (tmp_path / "config.json").write_text(config_lib.to_json(config_with()))
  (tmp_path / "sft").symlink_to(toy_model)
  return tmp_path


def test_problems_that_are_sometimes_solved_are_studied(study_run):
  assert baselines._gsm8k_problems(study_run) == [1, 2, 5]
  assert baselines.gsm8k_error(str(study_run), 3) == ""
  assert "has 3 problems" in baselines.gsm8k_error(str(study_run), 4)


@pytest.mark.parametrize(
  "name, text, reason",
  [
    ("config.json", "{}", "lacks"),
    ("config.json", "nothing", "Expecting value"),
    ("before.json", "{}", "'rewards'"),
    ("before.json", "[]", "list indices"),
    ("before.json", '{"rewards": "none"}', "could not convert"),
    ("before.json", None, "before.json"),
  ],
)
def test_a_run_that_is_none(name, text, reason, study_run):
  """One file at a time, and what is wrong with it."""
  (study_run / name).unlink()
  if text is not None:
    (study_run / name).write_text(text)
  error = baselines.gsm8k_error(str(study_run), 3)
  start, _, rest = error.partition("before.json (")
  assert start == "no run of grpojax.studies.gsm8k with its "
  assert reason in rest


def test_an_older_run_gets_the_defaults_that_it_lacks(study_run):
  config = json.loads((study_run / "config.json").read_text())
  del config["train"]["sampling"]["slots"]
  (study_run / "config.json").write_text(json.dumps(config))
  assert baselines.gsm8k_error(str(study_run), 3) == ""
  assert baselines._gsm8k_settings(study_run).sampling.decoding.slots == 0


def test_other_rewards_than_those_of_the_study_are_refused(study_run):
  config = config_with()
  config.train.reward.functions = ("exact_answer",)
  (study_run / "config.json").write_text(config_lib.to_json(config))
  error = baselines.gsm8k_error(str(study_run), 3)
  assert "scored by ('exact_answer',)" in error


def test_a_model_that_is_gone_is_not_looked_for_on_the_hub(
  study_run, monkeypatch
):
  monkeypatch.chdir(study_run.parent)
  (study_run / "sft").unlink()
  error = baselines.gsm8k_error(study_run.name, 3)  # NAME/sft is a name there
  assert f"{study_run}/sft" in error
