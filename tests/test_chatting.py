"""Conversations with a model, without one."""

import pytest

from grpojax import chat
from grpojax.chat import Answer

NOBODY = chat.Speaker(*[None] * 5)


@pytest.fixture
def asked(monkeypatch):
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


def test_a_chat_remembers_what_was_said(asked):
  shown = []
  lines = iter(["one ", "two", "three", "/quit", "never"])
  chat.talk(NOBODY, lines, shown.append, turns=True)
  first = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "answer 1"},
    {"role": "user", "content": "two"},
  ]
  assert asked[:2] == ["one", first]
  third = {"role": "assistant", "content": "answer 2"}
  assert asked[2:] == [[*first, third, {"role": "user", "content": "three"}]]
  assert shown[0].splitlines()[0] == "answer 1"


@pytest.mark.parametrize("between, turns", [("/new", True), ("", False)])
def test_what_was_said_is_not_shown_again(between, turns, asked):
  chat.talk(NOBODY, iter(["one", between, "two"]), print, turns=turns)
  assert asked == ["one", "two"]


def test_what_the_template_refuses_ends_no_chat(asked):
  shown = []
  chat.talk(NOBODY, iter(["too hard", "two"]), shown.append, turns=True)
  assert shown[0] == r"error: no such role\x1b" and asked == ["too hard", "two"]


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
