"""The program that asks a model, and conversations without one."""

import io
import re
import shutil

import pytest

from grpojax import chat
from grpojax.chat import Answer
from grpojax.rewards import exact
from grpojax.runtime.cli import config as config_lib
from grpojax.training.settings.run import TrainSettings

NOBODY = chat.Speaker(*[None] * 5)


@pytest.fixture
def run(toy, toy_model, tmp_path, config_with):
  """A run of the toy task that is finished, as far as others can see."""
  words = dict(word[9:].split("=", 1) for word in toy.arguments(toy_model))
  names = ("sampling.max_new_tokens", "data.max_prompt_length")
  sizes = {name.replace(".", "__"): int(words[name]) for name in names}
  config = config_with(**sizes, model__path=str(toy_model), eval__num_prompts=2)
  (tmp_path / "config.json").write_text(config_lib.to_json(config))
  (tmp_path / "summary.json").write_text("{}")
  shutil.copytree(toy_model, tmp_path / "model")
  return tmp_path


@pytest.mark.slow
def test_a_held_out_problem_is_answered_and_scored(run, toy_task, capsys):
  chat.main(
    [f"--model={run}", "--example=5", "--samples=16", "--config.seed=1"]
  )
  output = capsys.readouterr().out
  problem = toy_task.load("test", size=6)[5]
  prompt, _, output = output.partition("\n")
  assert prompt == problem["prompt"]  # more of them than the run evaluates
  answers = re.split(r"  \(\[\d+/16\], reward (\S+), \d+ tokens.*\)\n", output)
  *pairs, last = answers
  assert len(pairs) == 32 and last == "the right answer: 7\n"
  rewards = set()
  for text, reward in zip(pairs[::2], pairs[1::2], strict=True):
    assert float(reward) == exact.exact_answer("", text, problem)
    rewards.add(reward)
  assert rewards == {"0", "1"}  # it answers 3, 5 or 7


def test_a_line_is_a_prompt(toy_model, toy_task, capsys, monkeypatch):
  monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n12+13+14+15\n1+1\n"))
  words = "sampling.max_new_tokens=8 data.max_prompt_length=8"  # one is longer
  words = [f"--config.{word}" for word in words.split()]
  chat.main([str(toy_model), "--temperature=0", *words])
  output = re.split(r"  \(\d tokens.*\)\n", capsys.readouterr().out)
  assert len(output) == 4 and output[0] == output[2]
  assert output[0].startswith("####")


def test_bytes_that_are_no_text_end_no_chat(monkeypatch):
  stdin = io.TextIOWrapper(io.BytesIO(b"a\xffb\nc\n"), "utf-8", "strict")
  monkeypatch.setattr("sys.stdin", stdin)
  assert list(chat._lines()) == ["a\ufffdb", "c"]


def test_a_problem_beyond_those_that_are_drawn():
  with pytest.raises(ValueError, match=f"--example = {10**9}: .* 100000 of"):
    chat._example(TrainSettings(), 10**9)


@pytest.mark.parametrize(
  "words, hint",
  [
    ([], "give --model"),
    (["MODEL", "--prompt=a\udcffb"], "--prompt is no UTF-8 text"),
    (["--model=none_such"], "none_such"),
    (["RUN", "--prompt=x", "--example=1"], "--prompt or --example, not both"),
    (["MODEL", "--example=60"], "there are 50 held-out problems, the last"),
    (["RUN", "--config.sampling.max_new_tokens=0"], "max_new_tokens = 0"),
    (
      ["RUN", "--prompt=12", "--config.sampling.max_new_tokens=1023"],
      "a prompt of 3 tokens",
    ),
    (["RUN", "--turns=all"], "no chat template"),
    (["RUN", "--temperature=1e-9"], "must be 0.01 or more"),
    (["RUN", "--example=1", "--config.reward.functions=x"], "x"),
  ],
)
def test_mistakes_are_reported_before_anything_compiles(
  words, hint, run, toy_model, toy_task, monkeypatch
):
  monkeypatch.setattr(chat.sampling_lib, "make_sampler", None)
  if "--example=60" in words:  # an endless data set ends nowhere
    fifty = [toy_task.load("test")[i] for i in range(50)]
    load = "grpojax.training.data.splits.load_examples"
    monkeypatch.setattr(load, lambda config, split: fifty)
  places = {"RUN": str(run), "MODEL": str(toy_model)}
  with pytest.raises(SystemExit) as caught:
    chat.main([places.get(word, word) for word in words])
  assert str(caught.value.code).startswith("error: ")
  assert hint in str(caught.value.code)


@pytest.fixture
def prompts(monkeypatch):
  """All prompts; the n-th is answered by "answer n", and then by another."""
  prompts, turns = [], set()

  def ask(speaker, example, turn):
    assert turn not in turns  # other samples each time
    turns.add(turn)
    prompts.append(example["prompt"])
    if example["prompt"] == "too hard":
      raise ValueError("no such role\x1b")
    first = Answer(f"answer {len(prompts)}", 2, True)
    return "", [first, Answer("another", 1, True)]

  monkeypatch.setattr(chat, "ask", ask)
  return prompts


def test_a_chat_remembers_earlier_turns(prompts):
  shown = []
  lines = iter(["one ", "two", "three", "/quit", "never"])
  chat.talk(NOBODY, lines, shown.append, turns=True)
  first = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "answer 1"},
    {"role": "user", "content": "two"},
  ]
  third = {"role": "assistant", "content": "answer 2"}
  last = {"role": "user", "content": "three"}
  assert prompts == ["one", first, [*first, third, last]]
  assert shown[0].splitlines()[0] == "answer 1"


@pytest.mark.parametrize("between, turns", [("/new", True), ("", False)])
def test_a_chat_forgets_earlier_turns(between, turns, prompts):
  chat.talk(NOBODY, iter(["one", between, "two"]), print, turns=turns)
  assert prompts == ["one", "two"]


def test_a_refusal_of_the_template_ends_no_chat(prompts):
  shown = []
  chat.talk(NOBODY, iter(["too hard", "two"]), shown.append, turns=True)
  assert shown[0] == r"error: no such role\x1b"
  assert prompts == ["too hard", "two"]


def test_answers_are_shown_without_control_characters():
  answers = [
    Answer("\x1b]0;mine\x07\nyes\n", 7, True, 1.0),
    Answer("no", 80, False, float("nan")),
  ]
  assert chat.answer_lines(answers) == [
    "\\x1b]0;mine\\x07\nyes",
    "  ([1/2], reward 1, 7 tokens)",
    "no",
    "  ([2/2], reward nan, 80 tokens, cut off there)",
  ]
  assert chat.answer_lines([Answer("x", 1, True)]) == ["x", "  (1 tokens)"]
