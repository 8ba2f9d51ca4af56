"""Environments of every convention, and invalid ones."""

import json
import pathlib
import re

import numpy as np
import pytest
from environments import drawing_environments as drawing

from grpojax.environments import conventions, spaces
from grpojax.environments.protocol import Step, to_step
from grpojax.runtime.processes.user_calls import WrongAnswer

USER = str(pathlib.Path(__file__).with_name("user_environments.py"))
DRAWING = str(pathlib.Path(USER).with_name("drawing_environments.py"))
GAMES = """
def reset(seed, start):
  return {"state": [seed, start]}

def step(action, state, *, scale=1):
  return dict(observation=action, reward=scale * state[0], state=(state[0], 2))

class Holder:
  def step(self, **everything):
    return {"observation": " ".join(sorted(everything))}

holder = Holder()
"""
ODD = """
import types

def multiply(a: int) -> int:
  'Another one.'
def step(a: int) -> int:
  'Has the name of a method.'
named_otherwise = multiply
def by_place(a: int, /): pass
def by_places(*numbers: int): pass
def no_docstring(a: int) -> int: pass
class OnlyReset:
  def reset(self): pass
class Asynchronous:
  async def reset(self): pass
  def step(self, action): pass
class Waits:
  async def __call__(self, action): pass
awaited_step = types.SimpleNamespace(step=Waits())
numbers = {}
"""


IMAGE = [{"role": "user", "content": [{"type": "image"}]}]


@pytest.mark.parametrize(
  "answer, reason",
  [
    (Step(reward=float("nan")), "the reward nan"),
    (("right", 1.0, True, False, {}), "('right', 1.0, True, False, {}): write"),
    ({"obs": "right"}, "{'obs': 'right'}: write `return Step("),
    (Step(3), "the observation 3: use text"),
    (Step([{"role": "user"}]), "the observation [{'role': 'user'}]"),
    (Step(IMAGE), "the observation [{'role': 'user', 'content': [{"),
    (Step(done="False"), "done='False'"),
    (Step(info=[1]), "info=[1]: use a dict"),
    (Step("x" * 10**7), "an observation of 10000002 bytes, limit 1048576"),
    (Step(state=object()), "a state that is not JSON"),
    (Step(state=float("nan")), "a state that is not JSON"),
    (Step(state="x" * 2**22), "a state of 4194306 bytes, limit 4194304"),
  ],
)
def test_invalid_answers_are_refused(answer, reason):
  with pytest.raises(WrongAnswer, match=re.escape(f"returned {reason}")):
    to_step(answer)


def call(name, **arguments):
  text = json.dumps({"name": name, "arguments": arguments})
  return f"I think.\n<tool_call>\n{text}\n</tool_call>"


def play(environment, example, *actions, seed=1):
  """Returns the steps of an episode without their states."""
  steps = [environment.reset(example, seed)]
  for action in actions:
    steps.append(environment.step(steps[-1].state, action, example, seed))
  return [step._replace(state=None, info={}) for step in steps]


def test_functions_get_the_arguments_that_they_name(tmp_path, monkeypatch):
  file = tmp_path / "my_games.py"
  file.write_text(GAMES)
  game = conventions.resolve(str(file), options={"scale": 3, "start": 4})
  assert game.reset({}, 7) == Step(state=[7, 4])
  assert game.step([7, 4], "go", {}, 8) == Step("go", 21.0, state=[7, 2])
  monkeypatch.syspath_prepend(tmp_path)
  holder = conventions.resolve("my_games:holder")
  assert holder.step(0, "a", {}, 0).observation == "action example seed state"
  with pytest.raises(ValueError, match="step cannot.*unexpected.*'scal'"):
    conventions.resolve(str(file), options={"scal": 1, "start": 0})


@pytest.mark.parametrize("name", ["state", "action", "example", "seed"])
def test_options_cannot_have_names_of_the_runs_arguments(name, tmp_path):
  file = tmp_path / "mine.py"
  for arguments in (name, "**everything"):
    file.write_text(f"def step({arguments}): pass\n")
    with pytest.raises(ValueError, match=f"step gets {name!r} .*rename"):
      conventions.resolve(str(file), options={name: 1})
  # `reset` has no such argument, so the option is allowed.
  file.write_text(f"def reset({name}): pass\ndef step(): return {{}}\n")
  if name in ("state", "action"):
    assert conventions.resolve(str(file), options={name: 1})


def test_gymnasium():
  game = conventions.resolve(f"{USER}:Game")
  first, second, third = play(game, {"offset": 1}, "left", "stop")
  assert first == Step("")
  assert second.observation.startswith("1: left for") and not second.done
  assert (third.reward, third.done) == (1.0, True)
  assert play(game, {"offset": 1}, "left")[1] == second
  assert play(game, {"offset": 1}, "left", seed=2)[1] != second
  old = conventions.resolve(f"{USER}:OldGame")
  steps = [Step("begins with 1"), Step("a", 1.0), Step("stop", 1.0, True)]
  assert play(old, {}, "a", "stop") == steps


def test_a_registered_environment_of_gymnasium():
  pytest.importorskip("gymnasium")
  game = conventions.resolve(
    "gymnasium:FrozenLake-v1", options={"is_slippery": False}
  )
  turns = ["I go down: 1", "right", "4", "1", "2", "2", "1", "2"]
  first, *steps = play(game, {"answer": "1"}, *turns)
  legal = "End your turn with a legal action: a whole number from 0 to 3."
  assert first.observation.endswith(f"{legal}\n\nObservation: 0")
  assert "- 2: Move right" in first.observation
  seen = [step.observation for step in steps]
  assert seen == ["4", legal, legal, "8", "9", "10", "14", "15"]
  assert [step.reward for step in steps] == [0.0] * 7 + [1.0]
  assert [step.done for step in steps] == [False] * 7 + [True]


@pytest.mark.parametrize(
  "space, form, text, action",
  [
    (None, "auto", "go 2", "go 2"),
    (None, "number", "from 3 to -4.5.", -4.5),
    (None, "number", "a force of -1e-2", -0.01),
    (None, "number", "from 1 to -1,000,000", -1000000),
    (None, "number", "left", None),
    (None, "json", 'x ["a", {"b": 1}] y [1', ["a", {"b": 1}]),
    (None, "json", "[" * 10**5, None),
    ("Discrete(3, start=1)", "auto", "4 or 3", 3),
    ("Discrete(3, start=1)", "auto", "0", None),
    ("Discrete(3)", "auto", "1.0", None),
    ("Box(-1, 1, (1,))", "auto", "0.5", [0.5]),
    ("Box(-1, 1, (2, 1))", "auto", "[[0.5], [1]]", [[0.5], [1]]),
    ("Box(-1, 1, (2,))", "auto", "[0.5, 2]", None),
    ("MultiDiscrete([2, 3])", "auto", "[0.5, 2]", None),
    ("Text(4)", "auto", "left", "left"),
    ("Dict(a=Discrete(2))", "auto", '{"a": 1}', {"a": 1}),
    ("Dict(a=Discrete(2))", "auto", '{"b": 1}', None),
  ],
)
def test_actions_are_read_from_text(space, form, text, action):
  """A turn without a legal action has `action` None."""
  if space:
    spaces_of_gymnasium = pytest.importorskip("gymnasium.spaces")
    space = eval(space, vars(spaces_of_gymnasium))
  if action is None:
    with pytest.raises(spaces.IllegalAction, match="End your turn with a leg"):
      spaces.read_action(text, form, space)
  else:
    value = spaces.read_action(text, form, space)
    assert getattr(value, "tolist", lambda: value)() == action


@pytest.mark.parametrize(
  "value, text",
  [
    (7, "7"),
    (np.arange(3), "[0 1 2]"),
    ({"a": np.array([0, 2]), "b": (np.int64(3),)}, '{"a": [0, 2], "b": [3]}'),
    ((14, 10), "[14, 10]"),
    (drawing.Echo("é", 1), '{"echoed": "é", "length": 1}'),
    (drawing.Said("hello"), "hello"),
  ],
)
def test_observations_of_other_types_become_text(value, text):
  assert spaces.observation(value) == text
  with pytest.raises(ValueError, match="observation of type object, whose"):
    spaces.observation(object())


def test_openenv():
  client = conventions.resolve(f"{DRAWING}:Client", options={"url": "u"})
  steps = [Step("ready", 0.5), Step("u/a", 0.5), Step("u/stop", 0.5, True)]
  assert play(client, {}, "a", "stop") == steps
  echo = conventions.resolve(f"{DRAWING}:Echoes")
  first, second = play(echo, {}, "a")
  assert first == Step('{"echoed": "a", "length": 1}', 0.5)
  assert second == Step('{"echoed": "b", "length": 2}', 1.0)


def test_trl_classes():
  words = conventions.resolve(f"{USER}:Words")
  (tool,) = words.tools
  assert tool["function"]["name"] == "guess"
  assert tool["function"]["parameters"]["required"] == ["word"]
  turns = [call("guess", word=word) for word in ("crow", "flea", "flew")]
  example = {"secret": "flew", "prompt": "Guess."}
  steps = play(words, example, *turns, "It is flew.")
  contents = [x.observation[0]["content"] for x in steps[1:4]]
  assert contents == ["...w", "fle.", "flew"]
  assert steps[4] == Step("", 1 / 3, True)
  two = call("guess", word="no") + call("gues", word="flew")
  step = words.step(words.reset(example, 0).state, two, example, 0)
  assert step.info == {"tool_calls": 2, "tool_errors": 2}
  both = step.observation
  assert [x["content"] for x in both] == [
    "error: ValueError: another length",
    "error: there is no tool 'gues'; did you mean 'guess'?",
  ]


def test_trl_classes_with_other_tools(tmp_path):
  """With a tool called `step`, and with asynchronous tools and rewards."""
  echo = conventions.resolve(f"{USER}:Echo", [f"{USER}:multiply"])
  assert len(echo.tools) == 2
  turn = call("step", message="hello") + call("multiply", a=3)
  _, step, last = play(echo, {}, turn, "bye")
  assert [x["content"] for x in step.observation] == ["hello", "6"]
  assert last == Step("", 0.0, True)
  options = {"log": str(tmp_path / "log")}
  held = conventions.resolve(f"{USER}:Held", [f"{USER}:waits"], options)
  turn = call("look", number=3) + call("waits", a=4)
  _, step, last = play(held, {}, turn, "bye")
  assert [x["content"] for x in step.observation] == ["3", "4"]
  assert last == Step("", 1 / 8, True)


def test_tools_alone():
  environment = conventions.resolve("", [f"{USER}:multiply"])
  assert environment.reset({}, 0) == Step()
  step = environment.step(None, call("multiply", a=6, b=7), {}, 0)
  message = {"role": "tool", "name": "multiply", "content": "42"}
  info = {"tool_calls": 1, "tool_errors": 0}
  assert step == Step([message], state=1, info=info)
  last = environment.step(step.state, "42", {}, 0)
  assert last == Step(done=True, state=2)


@pytest.mark.parametrize(
  "path, tools, message",
  [
    ("", [], "set path or tools"),
    ("retr", [], "did you mean 'retry'"),
    ("ODD:OnlyReset", [], "needs `reset` and `step`"),
    (f"{DRAWING}:Client", [], "cannot be called with.*required .*: 'url'"),
    ("ODD:Asynchronous", [], "reset is asynchronous"),
    ("ODD:awaited_step", [], "step is asynchronous"),
    (f"{USER}:multiply", [], "is a function without a function `step`"),
    (USER, [f"{USER}:multiply"], "reads the model's turns itself"),
    (f"{USER}:Game", [f"{USER}:multiply"], "reads the model's turns itself"),
    (USER, [], "environment.action = 'number' needs a class"),
    (f"{USER}:Words", [], "environment.action = 'number' needs a class"),
    ("gymnasium:NoSuch-v0", [], "cannot be made: "),
    ("", ["multiply"], "unknown tool 'multiply'.*file.py:NAME"),
    ("", ["ODD:numbers"], "is not a function"),
    ("", [f"{USER}:multiply", "ODD:named_otherwise"], "name 'multiply'"),
    (f"{USER}:Echo", ["ODD:step"], "name 'step'.*methods"),
    ("", ["ODD:by_place"], r"called with \['a'\]: "),
    ("", ["ODD:by_places"], r"called with \['numbers'\]: .*unexpected"),
    ("", ["ODD:no_docstring"], "no docstring.*under `Args:`"),
  ],
)
def test_invalid_environments_are_refused(path, tools, message, tmp_path):
  file = tmp_path / "odd.py"
  file.write_text(ODD)
  path, *tools = (name.replace("ODD", str(file)) for name in (path, *tools))
  action = "number" if "environment.action" in message else "auto"
  with pytest.raises(ValueError, match=message):
    _ = conventions.resolve(path, tools, action=action).tools
