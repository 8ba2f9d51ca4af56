"""Training runs with environments on the host."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from grpojax import chat, evaluate
from grpojax.data.examples import READ
from grpojax.environments import tools
from grpojax.rewards import conventions
from grpojax.runtime.files import records
from grpojax.runtime.processes import user_calls
from grpojax.training.report import reporting
from grpojax.training.step import episodes, reference

AGAIN = """
def reset(example, seed):
  return {"state": {"tries": 0}}

def step(state, action, example):
  tries = state["tries"] + 1
  if FAILS and tries == 2:
    raise RuntimeError("no more")
  right = action.rpartition("#")[2].strip() == example["answer"]
  return {"observation": "no", "reward": float(right) - 0.125 * (tries > 1),
          "done": right, "state": {"tries": tries}, "info": {"tries": 1}}
"""
TALKS = """
def talks(completions, messages):
  assert all(m[-1]["role"] == "assistant" for m in messages)
  assert all(m[-1]["content"] == c for m, c in zip(messages, completions))
  return [float(len(m)) for m in messages]
"""
BY_TURN = {"environment.credit": "turn", "loss.weighting": "fixed_length"}


@pytest.fixture
def write(tmp_path):
  """`(name, text) -> path` of a Python file."""

  def write(name, text):
    (tmp_path / f"{name}.py").write_text(text)
    return tmp_path / f"{name}.py"

  return write


@pytest.fixture
def go(train_short, write, tmp_path):
  """Runs a short training with the environment; returns its directory."""

  def go(name="run", fails=False, **changes):
    path = write(f"again{fails}", AGAIN.replace("FAILS", str(fails)))
    settings = {
      "sampling.max_new_tokens": 40,
      "environment.path": path,
      "environment.max_turns": 3,
      "reward.functions": "environment",
    }
    train_short(name, **settings | changes)
    return tmp_path / name

  return go


def rows_of(run, file="samples"):
  return records.read_jsonl(run / f"{file}.jsonl")


@pytest.mark.slow
def test_turns_have_their_own_tokens_rewards_and_advantages(go, capsys):
  more = {"optim.packing": True, "sampling.parts": 2, "environment.workers": 1}
  run = go(**BY_TURN | more)
  assert "held-out mean return after 2 steps: " in capsys.readouterr().out
  summary = json.loads((run / "summary.json").read_text())
  low, high = summary["reward_after_interval"]
  assert low <= summary["reward_after"] <= high
  assert '"episodes":true' in (run / "report.html").read_text()
  rows = rows_of(run)
  assert {len(row["turns"]) for row in rows} == {1, 3, 5}
  for row in rows:
    turns = row["turns"]
    by = ["model", "environment", "model", "environment", "model"][: len(turns)]
    assert [turn["by"] for turn in turns] == by
    assert sum(turn["tokens"] for turn in turns) == len(row["tokens"])
    assert {turn["text"] for turn in turns[1::2]} <= {"\nno\n"}
    rewards = [turn["reward"] for turn in turns[::2]]
    assert row["reward"] == pytest.approx(sum(rewards))
    assert row["completion"] == turns[-1]["text"].removesuffix("\n\n")
    # Tokens of the environment have advantage 0.
    observed = sum(
      ([x["by"] == "environment"] * x["tokens"] for x in turns), []
    )
    assert not np.array(row["advantage"])[observed].any()
    advantages = iter(row["advantage"])
    for turn in turns:
      values = {next(advantages) for _ in range(turn["tokens"])}
      assert values == {turn.get("advantage", 0.0)}
    assert [x is None for x in row["logprobs"]] == observed
  step = [row for row in rows_of(run, "metrics") if "turns_mean" in row][-1]
  assert step["turns_mean"] > 1.5 and step["seconds_environment"] > 0
  tries = step["logged/environment/tries"]
  assert tries == pytest.approx(step["turns_mean"], abs=1e-4)
  assert step["sampled_tokens_mean"] < step["completion_length_mean"]


@pytest.mark.long
def test_a_prompt_that_becomes_too_long_fails_its_group(go, write):
  length = "len(example['prompt'])"
  observes = f"' 1' * (99 if {length} == 4 else {length})"
  path = write(
    "observes",
    f"{AGAIN.replace('FAILS', 'False')}\n"
    "def reset(example, seed):\n"
    f"  return {{'observation': {observes}, 'state': {{'tries': 0}}}}\n",
  )
  changes = {"environment.path": path, "data.max_prompt_length": 32}
  rows = rows_of(go(steps=1, **changes))
  assert len({row["prompt"].count(" 1") for row in rows}) > 1
  for row in rows:
    assert (row["reward"] is None) == (" 1" not in row["prompt"])
  assert 0 < sum(row["reward"] is None for row in rows) < len(rows)


def test_a_directory_may_contain_a_colon():
  for name in ("", "reset"):
    path = f"a:b/game.py:{name}".rstrip(":")
    assert user_calls.split(path) == ("a:b/game.py", name)


OBSERVES = """
def reset(example, seed):
  return {"observation": f" {seed % 10}"}

def step(action):
  return {"observation": "no", "reward": float(len(action) % 2)}

def judge(prompts, completions):
  assert prompts[0].split()[1].isdecimal(), prompts
  return [1.0] * len(prompts)
"""


@pytest.mark.slow
def test_a_reference_reads_the_observation_of_reset_also_after_a_crash(
  go, write, monkeypatch, capsys
):
  # The reference is the policy itself: with equal prompts the KL is 0.
  path = write("observes", OBSERVES)
  settings = {
    "steps": 3,
    "environment.path": path,
    "environment.max_turn_tokens": 4,
    "data.max_prompt_length": 16,
    "model.reference_prompt": "{prompt}",
    "loss.beta": 0.1,
    "loss.correction": "sequence_truncate",
    "optim.learning_rate": 1e-12,
    "reward.functions": f"environment,{path}:judge",
    "reward.weights": "1,1",
    "sampling.ahead": 1,
  }
  log = reporting.log_failures

  def crash(run, number, failures):
    assert not failures
    if number == 2:
      raise RuntimeError("crash")
    log(run, number, failures)

  with monkeypatch.context() as patched:
    patched.setattr(reporting, "log_failures", crash)
    with pytest.raises(RuntimeError, match="crash"):
      go(**settings)
  capsys.readouterr()
  rows = rows_of(go(**settings), "metrics")
  assert "resuming after step 1" in capsys.readouterr().out
  assert max(abs(row["kl"]) for row in rows if "kl" in row) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
  "function, zero, by_turn",
  [
    ("environment", False, {}),
    pytest.param("talks", False, {}, marks=pytest.mark.long),
    pytest.param("environment", True, BY_TURN, marks=pytest.mark.long),
  ],
)
def test_a_failed_trajectory_has_no_reward_or_0(
  go, write, function, zero, by_turn, capsys
):
  if function == "talks":
    function = f"{write('talks', TALKS)}:talks"
  options = by_turn | ({"environment.failed": "zero"} if zero else {})
  options["reward.functions"] = function
  run = go(fails=True, steps=1, **options)
  assert "rewards failed; the first: environment" in capsys.readouterr().out
  rows = rows_of(run)
  failed = [row for row in rows if len(row["turns"]) > 1]
  assert failed and len(failed) < len(rows)
  assert {row["reward"] for row in failed} == {0.0 if zero else None}
  assert any(np.any(row["advantage"]) for row in failed) == zero
  steps = [x for x in rows_of(run, "metrics") if "reward_failures" in x]
  assert [x["reward_failures"] for x in steps] == [len(failed)]
  assert np.isfinite(steps[0]["grad_norm"])
  failures = rows_of(run, "failures")
  assert failures[0]["reason"].startswith("turn 1: raised RuntimeError: no")
  assert failures[0]["function"] == "environment"
  prompts = {failure["prompt"] for failure in failures}
  assert prompts & {row["prompt"] for row in failed} and "" not in prompts


LOOK = """
class Look:
  def reset(self, prompt, **columns):
    self._calls = 0
    return " 1"

  def look(self) -> str:
    '''Looks.'''
    self._calls += 1
    return "5"

  def get_reward(self):
    return self._calls / 8
"""
ENDS = "\n\n", "<|endoftext|>"
TEMPLATE = (
  "{% if tools %}{% endif %}{% for m in messages %}{{ m['content'] }}"
  "{{ eos_token if m['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


@pytest.mark.slow
def test_tools_of_a_class_and_its_reward_at_the_end_and_when_cut_off(
  go, write, toy_model, tmp_path, monkeypatch
):
  model = shutil.copytree(toy_model, tmp_path / "model")
  (model / "chat_template.jinja").write_text(TEMPLATE)
  path = write("look", LOOK)
  # The model calls the tool unless it answers 7.
  calls = lambda text: [] if "7" in text else [tools.Call("look", {})]
  monkeypatch.setitem(tools.TOOL_CALLS, "hermes", calls)
  settings = {"environment.path": f"{path}:Look", "data.template": "{prompt}"}
  settings |= {"data.max_prompt_length": 16, "environment.max_turns": 2}
  run = go(steps=1, **settings | {"model.path": model})
  ends = {True: 0, False: 0}
  for row in rows_of(run):
    assert row["prompt"].endswith(" 1\n")
    by = [(x["by"], x["text"]) for x in row["turns"]]
    assert all(text.endswith("5\n") for who, text in by if who != "model")
    texts = [text for who, text in by if who == "model"]
    called = sum("7" not in x and x.endswith(ENDS) for x in texts)
    ends["7" in texts[-1]] += 1
    last = [x["reward"] for x in row["turns"] if x["by"] == "model"][-1]
    assert last == row["reward"] == called / 8
  assert min(ends.values()) > 0
  metrics = rows_of(run, "metrics")
  assert any("logged/environment/tool_calls" in row for row in metrics)


@pytest.mark.slow
def test_chat_and_evaluate_play_the_environment(
  go, write, toy_task, tmp_path, capsys
):
  run = go(steps=1)
  capsys.readouterr()
  chat.main([f"--model={run}", "--example=0", "--config.seed=3", "--samples=8"])
  printed = capsys.readouterr().out
  assert "environment: no\n" in printed and printed.count("reward ") == 8
  assert "model: " in printed
  # A model without a run gets the environment from the settings.
  model = f"--model={run / 'model'}"
  path = "--config.environment.path="
  changes = {"reward.functions": "environment", "environment.max_turns": 3}
  changes |= {"sampling.max_new_tokens": 40, "eval.num_prompts": 4}
  reads = "data. environment. eval.num_prompts reward. sampling.max".split()
  words = toy_task.arguments(run / "model", reads, **changes)
  words = [word for word in words if "model.path" not in word]
  evaluate.main([model, *words, f"{path}{tmp_path / 'againFalse.py'}"])
  after = json.loads((run / "summary.json").read_text())["accuracy_after"]
  assert f"accuracy  {after:.1%}" in capsys.readouterr().out
  # Without a prompt length, the observation of reset may have any length.
  other = write(
    "other",
    "def reset():\n  return {'observation': '1' * 50}\n"
    "def step():\n  raise OSError('broken')",
  )
  alone = [w for w in words if "max_prompt_length" not in w]
  alone.append(f"{path}{other}")
  chat.main([model, "--prompt=1+1", *(w for w in alone if "eval." not in w)])
  assert "the environment failed: turn 0:" in capsys.readouterr().out
  evaluate.main([model, *alone])
  assert "4 rewards failed" in capsys.readouterr().out
  other.write_text("def reset():\n  raise OSError\ndef step():\n  pass")
  with pytest.raises(SystemExit, match="the environment"):
    evaluate.main([model, *words, f"{path}{other}"])


@pytest.mark.parametrize(
  "prompt, observed, expected",
  [
    ("2+2", "", "Q: 2+2"),
    ("2+2", "hint", "Q: 2+2\n\nhint"),
    ("2+2 ", "hint", "Q: 2+2 hint"),
    ("2+2", [{"role": "user", "content": "hint"}], "Q: 2+2|hint"),
    ([{"role": "user", "content": "2+2"}], "hint", "2+2\n\nhint"),
    ([{"role": "user", "content": "a" * 90}], "hint", "raise data.max_pro"),
    (
      [{"role": "assistant", "tool_calls": []}],
      "hint",
      "has no text .*change {'role'",
    ),
  ],
)
def test_the_observation_of_reset_is_appended_to_the_prompt(
  prompt, observed, expected, settings_with
):
  changes = {"template": "Q: {prompt}", "max_prompt_length": 60}
  data = dataclasses.replace(settings_with().data, **changes)

  def encode(prompt):  # data.template does not apply to chats
    text = f"Q: {prompt}"
    if not isinstance(prompt, str):
      text = "|".join(message["content"] for message in prompt)
    return text, [*text.encode()]

  def join():
    return episodes.join_prompt(encode, data, {"prompt": prompt}, observed)

  if expected.startswith(("raise", "has")):
    with pytest.raises(ValueError, match=expected):
      join()
    return
  prompt, *read = join()
  assert read == [expected, [*expected.encode()]]
  assert encode(prompt)[0] == expected
  # The reference and functions of TRL's signature read the same prompt.
  example = {"prompt": "alone", READ: prompt}
  assert reference.hinted("{prompt}", example) == prompt
  judge = conventions.follow("judge", lambda prompts: [prompts], {})
  assert judge([("", "", example)]) == [[prompt]]
