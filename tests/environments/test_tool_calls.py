"""Tool calls in the formats of models, and the built-in examples."""

import decimal
import pathlib

import jax
import jax.numpy as jnp
import pytest

from grpojax.environments import conventions, tools
from grpojax.environments import higher_lower as game
from grpojax.environments.calculator import calculator
from grpojax.environments.protocol import Step, to_step
from grpojax.environments.tools import TOOL_CALLS, Call

ADD = Call("add", {"a": 1})
F = Call("f", {})
GOOD = {
  "hermes": [
    ("Sum.", []),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [ADD]),
    ('<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}', [ADD]),
    ('x <tool_call>{"name": "f"}</tool_call> y' * 2, [Call("f", {})] * 2),
    ('<think><tool_call>{"name": "f"}</tool_call></think>Done.', []),
    ('<think>So: <tool_call>{"name": "f"}</tool_call>', []),
    ('<tool_call></tool_call></think><tool_call>{"name": "f"}', [F]),
    ('<think>a</think><tool_call>{"name": "f"}</tool_call><think>', [F]),
  ],
  "llama3": [
    ("Sum {}.", []),
    ('{"answer": 3}', []),
    ('<think>{"name": "g"}</think>{"name": "f"}', [F]),
    (' {"name": "add", "parameters": {"a": 1}}\n', [ADD]),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
    ('{"name": "add", "parameters": {"a": 1}}; {"name": "f"}', [ADD, F]),
  ],
  "mistral": [
    ("Sum.", []),
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [ADD]),
    ("<think>[TOOL_CALLS]g[ARGS]{}</think>[TOOL_CALLS]f[ARGS]{}", [F]),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}', [ADD, F]),
  ],
}
BAD = {
  "hermes": [
    "<tool_call></tool_call>",
    "<tool_call>add(1)</tool_call>",
    "<tool_call>[1]</tool_call>",
    "<tool_call>" + "[" * 10**5,
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "1 +"}</tool_call>',
    f'<tool_call>{{"name": "add", "arguments": {"9" * 5000}}}</tool_call>',
  ],
  "llama3": [
    "<|python_tag|>print(1)",
    '{"name": "add", "parameters": {"a": 1}',
    '{"name": "add", "parameters": 1}',
  ],
  "mistral": ["[TOOL_CALLS] add", "[TOOL_CALLS] [1]", "[TOOL_CALLS]add[ARGS]{"],
}


@pytest.mark.parametrize("form", TOOL_CALLS)
def test_calls_are_read(form):
  for text, calls in GOOD[form]:
    assert TOOL_CALLS[form](text) == calls, text
  for text in BAD[form]:
    (error,) = TOOL_CALLS[form](text)
    assert isinstance(error, str) and len(error) < 300, text[:80]


@pytest.mark.parametrize("form", TOOL_CALLS)
def test_made_up_calls_are_calls(form):
  kinds = {
    "a": {"type": "integer"},
    "b": {"type": ["number", "string"]},
    "c": {"type": "string", "enum": ["x", "y"]},
    "d": {"anyOf": []},
    "e": {"type": "boolean"},
  }
  parameters = {"properties": kinds, "required": ["a", "b", "c", "d"]}
  schema = {"function": {"name": "f", "parameters": parameters}}
  arguments = {"a": 1, "b": 1.0, "c": "x", "d": "1"}
  turn = tools.made_up(schema, form)
  assert TOOL_CALLS[form](turn) == [Call("f", arguments)]


def test_errors_are_returned_to_the_model():
  ran = []

  def add(a, b=0):
    ran.append(a)
    if a == 0:
      raise ZeroDivisionError("no zeros")
    if a == 9:
      raise SystemExit
    return a + b

  calls = [
    Call("add", {"a": 1}),
    Call("add", {"c": 1}),
    Call("Add", {}),
    "this is no JSON",
    Call("add", {"a": 0}),
    Call("add", {"a": 9}),
    Call("add", {"a": 2, "b": 3}),
    Call("add", {"a": 10**5000}),  # str refuses it
  ]
  step = tools.answer(calls, {"add": add})
  assert [x["content"] for x in step.observation] == [
    "1",
    "error: wrong arguments: missing a required argument: 'a'",
    "error: there is no tool 'Add'; did you mean 'add'?",
    "error: this is no JSON",
    "error: ZeroDivisionError: no zeros",
    "error: SystemExit: ",
    "5",
    step.observation[-1]["content"],
  ]
  assert "error: ValueError: Exceeds" in step.observation[-1]["content"]
  assert {x["role"] for x in step.observation} == {"tool"}
  assert step.info == {"tool_calls": 8, "tool_errors": 6}
  assert ran == [1, 0, 9, 2, 10**5000]


def test_results_need_a_text_that_all_processes_share():
  def ask(value):
    step = tools.answer([F], {"f": lambda: value})
    return step.observation[0]["content"]

  values = [3, None, 0.5, True, "<f at 0x7f>", ["a", {"b": "at 0x7f"}], (1, 2)]
  for value in (*values, decimal.Decimal("0.1"), pathlib.Path("a")):
    assert ask(value) == str(value)
  thing = object()
  values = [thing, (x for x in "ab"), [thing], {"a": lambda: 1}, thing.__str__]
  for value in (*values, {"a", "b"}, (1, frozenset("ab"))):
    with pytest.raises(ValueError, match="tool 'f', whose result of type"):
      ask(value)


def test_the_calculator():
  (schema,) = conventions.resolve(
    "", ["grpojax.environments.calculator:calculator"]
  ).tools
  assert [*schema["function"]["parameters"]["properties"]] == ["expression"]
  for expression, result in {
    "1 + 2 * 3": "7",
    " (1 + 2) * -3 ": "-9",
    "0.1 + 0.2 - 1": "-0.7",
    "1 / 3": "0.333333333333",
    "2 / 4 * 2": "1",
    "---1": "-1",
    f"{10**90}*{10**90}": str(10**180),
    f"{10**190}/7": "1.42857142857e+189",
  }.items():
    assert calculator(expression) == result
  refused = "9**9**9|9//2|1 +||()|(1, 2)|1(2)|1.2.3|x|__import__('os')|1e999"
  refused += "|1 if 2 else 3|1\n2|\0|١+١"
  texts = [*refused.split("|"), "(" * 150 + "1", "-" * 199 + "(", "1" * 201]
  for expression in texts:
    with pytest.raises(ValueError, match="numbers|expression"):
      calculator(expression)


def test_retry_discounts_later_answers():
  environment = conventions.resolve("retry", options={"discount": 0.5})
  example = {"answer": "1,080"}
  state = environment.reset(example, 0).state
  rewards = []
  for action in ("#### 3", "no mark 1080", "so #### 1080"):
    step = environment.step(state, action, example, 0)
    state = step.state
    rewards.append(step.reward)
    assert step.done == (action == "so #### 1080")
    assert bool(step.observation) != step.done
  assert rewards == [0.0, 0.0, 0.25]
  assert environment.step(None, "#### 1080", example, 0) == Step("", 1.0, True)
  with pytest.raises(ValueError, match="discount is 2"):
    conventions.resolve("retry", options={"discount": 2})
  with pytest.raises(ValueError, match="unexpected.*'turns'"):
    conventions.resolve("retry", options={"turns": 2})


def test_the_game_answers_and_ends():
  environment = game.higher_lower(8, max_turns=3, cost=0.2)
  key = jax.random.key(0)
  secret = environment.reset(jnp.int32(5), key)
  for guess, answer, reward in ((2, 8, -0.2), (6, 9, -0.2), (5, None, 1.0)):
    ids = jnp.array([9, guess, 0])  # a token before the number; padding
    secret, seen = environment.step(secret, ids, 2, key)
    assert float(seen.reward) == pytest.approx(reward)
    assert bool(seen.done) == (answer is None)
    assert answer is None or seen.ids.tolist() == [answer]


@pytest.mark.parametrize("text", ["\x01", "\U0001f600", '"'])
@pytest.mark.parametrize("calls", [1, 7])
def test_long_results_are_cut(text, calls):
  functions = {"page": lambda: text * 2**20}
  step = tools.answer([Call("page", {})] * calls, functions)
  contents = [x["content"] for x in to_step(step).observation]
  assert len(contents) == calls
  assert all(text * (2**17 // calls) == x for x in contents)
