"""The program `chat`, and conversations with a stub of a model."""

import io
import re
import shutil

import pytest
from run_helpers import refusal

from grpojax import chat
from grpojax.chat import Answer
from grpojax.rewards import exact
from grpojax.runtime.cli import configs
from grpojax.training.settings.run import TrainSettings

NOBODY = chat.Speaker(*[None] * 4)


@pytest.fixture
def run(toy, toy_model, tmp_path, config_with):
  """A directory that looks like a finished run of the toy task."""
  words = dict(word[9:].split("=", 1) for word in toy.arguments(toy_model))
  names = ("sampling.max_new_tokens", "data.max_prompt_length")
  sizes = {name.replace(".", "__"): int(words[name]) for name in names}
  config = config_with(**sizes, model__path=str(toy_model), eval__num_prompts=2)
  (tmp_path / "config.json").write_text(configs.to_json(config))
  (tmp_path / "summary.json").write_text("{}")
  shutil.copytree(toy_model, tmp_path / "model")
  return tmp_path


@pytest.mark.slow
def test_an_example_is_answered_and_scored(run, toy_task, capsys):
  chat.main(
    [f"--model={run}", "--example=5", "--samples=16", "--config.seed=1"]
  )
  output = capsys.readouterr().out
  problem = toy_task.load("test", size=6)[5]
  prompt, _, output = output.partition("\n")
  assert prompt == problem["prompt"]  # beyond eval.num_prompts
  answers = re.split(r"  \(\[\d+/16\], reward (\S+), \d+ tokens.*\)\n", output)
  *pairs, last = answers
  assert len(pairs) == 32 and last == "correct answer: 7\n"
  rewards = set()
  for text, reward in zip(pairs[::2], pairs[1::2], strict=True):
    assert float(reward) == exact.exact_answer("", text, problem)
    rewards.add(reward)
  assert rewards == {"0", "1"}


def test_each_line_is_a_prompt(toy_model, toy_task, capsys, monkeypatch):
  monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n12+13+14+15\n1+1\n"))
  words = "sampling.max_new_tokens=8 data.max_prompt_length=8"  # one is longer
  words = [f"--config.{word}" for word in words.split()]
  chat.main([str(toy_model), "--temperature=0", *words])
  output = re.split(r"  \(\d tokens.*\)\n", capsys.readouterr().out)
  assert len(output) == 4 and output[0] == output[2]
  assert output[0].startswith("####")


def test_invalid_utf8_does_not_end_a_chat(monkeypatch):
  stdin = io.TextIOWrapper(io.BytesIO(b"a\xffb\nc\n"), "utf-8", "strict")
  monkeypatch.setattr("sys.stdin", stdin)
  assert list(chat._lines()) == ["a\ufffdb", "c"]


def test_an_example_beyond_the_limit_is_refused():
  with pytest.raises(ValueError, match=f"--example = {10**9}: .* to 100000"):
    chat._example(TrainSettings(), 10**9)


@pytest.mark.parametrize(
  "words, hint",
  [
    ([], "give --model"),
    (["MODEL", "--prompt=a\udcffb"], "--prompt is not valid UTF-8"),
    (["RUN", "--prompt=x", "--example=1"], "--prompt or --example, not both"),
    (["MODEL", "--example=60"], "use 0 to 49, the held-out problems"),
    (
      ["RUN", "--prompt=12", "--config.sampling.max_new_tokens=1023"],
      "a prompt of 3 tokens",
    ),
    (["RUN", "--turns=all"], "needs a chat template"),
    (["RUN", "--temperature=1e-9"], "must be 0.01 or more"),
    (["RUN", "--example=1", "--config.reward.functions=x"], "x"),
  ],
)
def test_errors_are_raised_before_compilation(
  words, hint, run, toy_model, toy_task, monkeypatch
):
  monkeypatch.setattr(chat.sampling, "make_sampler", None)
  if "--example=60" in words:  # the toy task is endless
    fifty = [toy_task.load("test")[i] for i in range(50)]
    load = "grpojax.training.data.splits.load_examples"
    monkeypatch.setattr(load, lambda config, split: fifty)
  places = {"RUN": str(run), "MODEL": str(toy_model)}
  assert hint in refusal(chat, *(places.get(word, word) for word in words))


@pytest.fixture
def prompts(monkeypatch):
  """Recorded prompts; a stub answers the n-th with "answer n"."""
  prompts = []
  turns = set()

  def ask(speaker, example, turn):
    assert turn not in turns  # each turn draws different samples
    turns.add(turn)
    prompts.append(example["prompt"])
    if example["prompt"] == "too hard":
      raise ValueError("no such role\x1b")
    first = Answer(f"answer {len(prompts)}", 2, True)
    return "", [first, Answer("another", 1, True)]

  monkeypatch.setattr(chat, "ask", ask)
  return prompts


def test_a_chat_keeps_earlier_turns_and_continues_after_an_error(prompts):
  shown = []
  lines = iter(["one ", "two", "three", "/new", "too hard", "/quit", "never"])
  chat.talk(NOBODY, lines, shown.append, turns=True)
  first = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "answer 1"},
    {"role": "user", "content": "two"},
  ]
  third = {"role": "assistant", "content": "answer 2"}
  last = {"role": "user", "content": "three"}
  assert prompts == ["one", first, [*first, third, last], "too hard"]
  assert shown[0].splitlines()[0] == "answer 1"
  assert shown[-1] == r"error: no such role\x1b"


@pytest.mark.parametrize("between, turns", [("/new", True), ("", False)])
def test_a_chat_forgets_earlier_turns(between, turns, prompts):
  chat.talk(NOBODY, iter(["one", between, "two"]), print, turns=turns)
  assert prompts == ["one", "two"]


def test_control_characters_in_answers_are_escaped():
  answers = [
    Answer("\x1b]0;mine\x07\nyes\n", 7, True, 1.0),
    Answer("no", 80, False, float("nan")),
  ]
  assert chat.answer_lines(answers) == [
    "\\x1b]0;mine\\x07\nyes",
    "  ([1/2], reward 1, 7 tokens)",
    "no",
    "  ([2/2], reward nan, 80 tokens, truncated)",
  ]
  assert chat.answer_lines([Answer("x", 1, True)]) == ["x", "  (1 tokens)"]
