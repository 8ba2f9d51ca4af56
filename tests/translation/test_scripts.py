"""TRL's scripts: values, data sets, functions and tools in their code."""

import pathlib
import re

import pytest
from translated import become, cases, check

from grpojax import translate
from grpojax.runtime.cli import config_file
from grpojax.runtime.cli.configs import flatten
from grpojax.training.config import default_config, from_config
from grpojax.translation import writing

HEAD = """
import argparse
from datasets import Dataset, load_dataset
from games import Wordle
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
def score(completions, **kwargs): ...
def multiply(a: int, b: int): ...
class Game: ...
def play():
  def inner(): ...
"""
CALL = "GRPOTrainer(model={}, reward_funcs=score, args=GRPOConfig(max_steps=9))"
MISSING = "give --config.model.path=MODEL"
# Statements | arguments of GRPOTrainer -> settings, and ! for a note on tools.
SCRIPTS = cases("""
# An unknown model is not replaced by another.
| model=load('org/x') -> model.path=?
p = argparse.ArgumentParser(); p.add_argument('-m', '--the-model',
  default='org/x'); args = p.parse_args() | model=args.the_model ->
  model.path=org/x
NAME: str = 'org/x' | model=NAME -> model.path=org/x
m = AutoModelForCausalLM.from_pretrained('org/x') | model=m ->
  model.path=org/x
m, t = FastModel.from_pretrained(model_name='org/x') | model=m ->
  model.path=org/x
a = b; b = a | model=a -> model.path=?
| model=PeftModel.from_pretrained(x, 'org/adapter') -> model.path=?
| tools=[multiply] -> environment.tools=('theirs.py:multiply',)
| environment_factory=Wordle ->
  environment.path=games:Wordle reward.functions=('environment',)
| environment_factory=Game, tools=(multiply,) ->
  environment.path=theirs.py:Game environment.tools=('theirs.py:multiply',)
| tools=None -> environment.tools=() reward.functions=('math_answer',)
| reward_funcs=multiply -> reward.functions=('theirs.py:multiply',)
| tools=[inner] -> environment.tools=() !
| tools=Wordle -> environment.tools=() !
| tools=[multiply, lambda a: a] -> environment.tools=() !
| tools=[Game] -> environment.tools=() !
| rollout_func=multiply -> environment.path= !
| environment_factory=multiply -> environment.path=FILE.py:CLASS !
| environment_factory=lambda: Game() -> environment.path=FILE.py:CLASS !
| environment_factory={'a': Game} -> environment.path=FILE.py:CLASS !
d = load_dataset('json', data_files='a.jsonl', split='train') |
  train_dataset=d ->
  data.name=jsonl data.path=a.jsonl data.options.test=0.05
d = load_dataset('parquet', data_files={'train': 'p/*.parquet', 'val':
  ['b.parquet']}) |
  train_dataset=d.shuffle()['train'].map(f), eval_dataset=d['val'] ->
  data.name=parquet data.path=p/*.parquet data.options.test=b.parquet
d = load_dataset('org/set', 'main', split=['train', 'val[:9]']) |
  train_dataset=d[0], eval_dataset=d[1] ->
  data.name=huggingface data.path=org/set data.options.configuration=main
  data.options.test_split=val
d = load_dataset('org/set', split='fit').train_test_split(test_size=0.1) |
  train_dataset=d['train'], eval_dataset=d['test'] ->
  data.path=org/set data.options.test=0.1
| train_dataset=Dataset.from_dict(x) -> data.path=FILE.jsonl
# TRL has no column of answers: functions read any column.
d = load_dataset('json', data_files='a.jsonl') |
  train_dataset=d, reward_funcs=[score] -> data.options.answer=
d = load_dataset('json', data_files=f()) | train_dataset=d ->
  data.path=FILE.jsonl
""")


@pytest.mark.parametrize("code, expected", SCRIPTS)
def test_scripts(code, expected, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  statements, arguments = code.split("| ")
  arguments += ", args=GRPOConfig(max_steps=9), callbacks=[f()]"
  arguments += "" if "model=" in arguments else ", model='m'"
  text = f"{HEAD}{statements.strip()}\nGRPOTrainer({arguments})"
  config, leaves, translation = become(text, pathlib.Path(), ".py")
  check(leaves, re.sub(r"\S+=\?| !$", "", expected))
  unknown_model = "model.path=?" in expected
  assert (leaves["model.path"] == MISSING) == unknown_model
  flags = [x.flag for x in translation.notes]
  assert ("model.path=MODEL" in flags) == unknown_model
  assert translation.unneeded == ("callbacks",)
  missing = {x.origin: x.text for x in translation.notes if x.missing}
  tools = ("tools", "environment_factory", "rollout_func")
  unread = [missing[name] for name in tools if name in missing]
  assert bool(unread) == expected.endswith("!")
  assert all("environment." in x for x in unread)
  notes = "".join(x.text for x in translation.notes)
  assert (".map()" in notes) == (".map" in code)
  assert (".to_json" in notes) == (".map" in code or "from_dict" in code)
  # Workers import the script.
  assert ("__main__" in notes) == ("theirs.py" in f"{leaves}")
  if not unknown_model:
    from_config(config)


def test_the_command_has_flags_for_missing_settings(tmp_path, capsys):
  file = tmp_path / "theirs.py"
  out = tmp_path / "ours.py"
  call = CALL.replace("reward_funcs=score", "reward_funcs=[make()]")
  call = call.replace("max_steps=9", "max_steps=N, beta=B, temperature=T")
  file.write_text(HEAD + call.format("load()"))
  translate.main([str(file), f"--out={out}"])
  output = capsys.readouterr().out.replace("\\\n   ", "")
  words = output.splitlines()[-1].split()
  assert words[:4] == [*"python -m grpojax.train".split(), f"--config={out}"]
  assert sorted(words[4:]) == [
    "--config.data.path=FILE.jsonl",
    "--config.loss.beta=VALUE",
    "--config.model.path=MODEL",
    "--config.reward.functions=FILE.py:FUNCTION",
    "--config.sampling.temperature=VALUE",
    "--config.steps=N",
  ]
  config = config_file.load_file(str(out), default_config)
  assert config.reward.functions == ("FILE.py:FUNCTION",)


def test_the_yaml_of_a_trl_parser(tmp_path):
  script = tmp_path / "x.py"
  yaml = tmp_path / "x.yaml"
  yaml.write_text("model_name_or_path: org/model\nnum_generations: 4\n")
  script.write_text(
    HEAD
    + "args, model_args = TrlParser((A, B)).parse_args_and_config()\n"
    + "args.beta = 0.5\n"
    + "GRPOTrainer(model=model_args.model_name_or_path, args=args)\n"
  )
  settings = flatten(
    writing.config_of(translate.translate_file(script, yaml=yaml))
  )
  assert settings["model.path"] == "org/model"
  assert (settings["group_size"], settings["loss.beta"]) == (4, 0.5)
  without = translate.translate_file(script)
  assert flatten(writing.config_of(without))["model.path"] == MISSING
  assert any("--yaml=FILE" in x.text for x in without.notes)


FUNCTIONS = """
import re, torch
import json as js
from a import b
PATTERN = re.compile("x")  ; torch.manual_seed(1)
TABLE = {}
TABLE["one"] = 1
NAMES = []
for i in range(2):
  NAMES.append(re.escape(str(i)))
model = torch.load("x")
try:
  from fast import dumps
except ImportError:
  dumps = js.dumps
@b
def helper(x):
  # A comment.
  return PATTERN.sub("", dumps(x)), TABLE
def score(completions, model=None, environments=None, **kwargs):
  re = helper(completions)
  return [re, NAMES, LATE]
def main(): ...
if __name__ == "__main__":
  LATE = 1
"""


def test_functions_are_copied_with_the_code_they_use(tmp_path, capsys):
  file = tmp_path / "theirs.py"
  out = tmp_path / "ours.py"
  file.write_text(HEAD + FUNCTIONS + CALL.format("'m'"))
  translate.main([str(file), f"--out={out}"])
  output = capsys.readouterr().out
  text = (tmp_path / "ours_functions.py").read_text()
  copied = ["import re, torch", "import json as js", "from a import b"]
  copied += ["PATTERN = re.compile", 'TABLE["one"] = 1', "NAMES.append"]
  copied += ["dumps = js.dumps", "@b\ndef helper", "# A comment.", "def score"]
  assert [x for x in copied if x not in text] == []
  omitted = ["argparse", "manual_seed", "torch.load", "def main", "trl import"]
  assert [x for x in omitted if x in text] == []
  assert "LATE may change the run" in output
  assert "score may change the run: has a parameter `environments`" in output
  config = config_file.load_file(str(out), default_config)
  assert config.reward.functions == (f"{tmp_path}/ours_functions.py:score",)


@pytest.mark.parametrize(
  "text, name",
  [
    ("rf = [one]\nrf.append(two)", "reward_funcs"),
    ("rf = [one]\nrf += [two]", "reward_funcs"),
    ("if lr:\n  rf = one\nelse:\n  rf = two", "reward_funcs"),
    ("lr = 1e-3", "learning_rate"),
    ("args['beta'] = 0.1", "**args"),
    ("args.update(beta=0.1)", "**args"),
    ("if lr:\n  config.max_steps = 9", "max_steps"),
  ],
)
def test_values_that_change_become_notes(text, name, tmp_path, capsys):
  file = tmp_path / "theirs.py"
  start = "def one(completions): ...\ndef two(completions): ...\n"
  start += "lr = 1e-6\nargs = dict(beta=0.2)\n"
  start += "config = GRPOConfig(max_steps=5, learning_rate=lr, **args)\n"
  end = "\nGRPOTrainer('m', reward_funcs=rf, args=config)"
  file.write_text(f"\ufeff{start}{text}{end}")
  translate.main([str(file), f"--out={tmp_path}/with blank.py"])
  output = capsys.readouterr().out
  assert f"- {name} may change the run" in output
  assert f"--config='{tmp_path}/with blank.py'" in output
