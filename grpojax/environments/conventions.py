"""Loads environments written for grpojax, gymnasium, OpenEnv or TRL.

| `path`                                      | kind                           |
|---------------------------------------------|--------------------------------|
| a module or object with `step`              | grpojax: plain functions       |
| a class with `reset` and `step`             | gymnasium, a client of OpenEnv |
| "gymnasium:ID"                              | gymnasium                      |
| a class with `reset` and other methods; its | TRL's environment_factory      |
| `step`, if any, is annotated with `-> str`  |                                |
| empty, with functions as tools              | TRL's tools                    |

A constructor gets the options. A function gets those arguments that it has
parameters for, by name:

- functions of grpojax: state, action, example, seed and the options
- `reset` of gymnasium: seed, and the example as `options`
- `reset` of TRL: the columns of the example

gymnasium's `step` gets the action in the text (see `spaces`) and returns 4 or 5
values, or an object with `reward` and `done`. TRL's public methods are tools.
`get_reward`, if any, is the reward of an episode that ends in a turn without
calls or is cut off. Tools, `get_reward` and `close` may be asynchronous.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.environments import replay, spaces
from grpojax.environments import tools as tools_lib
from grpojax.environments.protocol import Step, is_step, to_step
from grpojax.environments.replay import seeded
from grpojax.rewards.conventions import by_keyword, refuse_asynchronous
from grpojax.rewards.functions import label
from grpojax.runtime.processes.user_calls import load

ENVIRONMENTS = {"retry": "grpojax.environments.retry"}
"""Built-in environments and their modules."""

Functions = dict[str, Callable[..., Any]]


class HostEnvironment(NamedTuple):
  """Functions of an environment, in the form that its workers call."""

  # `(example, seed) -> Step` begins an episode.
  reset: Callable[[dict[str, Any], int], Step]
  # `(state, action, example, seed) -> Step` answers a turn's text.
  step: Callable[[Any, str, dict[str, Any], int], Step]
  functions: Functions = {}  # tools that the model may call, by name
  # `(state, example, seed) -> Step` cuts an episode off and closes its
  # instance; None for environments without instances (see `replay`).
  end: Callable[[Any, dict[str, Any], int], Step] | None = None
  close: Callable[[], None] = lambda: None  # closes all instances

  @property
  def tools(self) -> list[dict[str, Any]]:
    """JSON schemas of the tools; ValueError if one lacks documentation."""
    return tools_lib.schemas(list(self.functions.values()))


def resolve(
  path: str,
  tools: Sequence[str] = (),
  options: Mapping[str, Any] | None = None,
  tool_format: str = "hermes",
  action: str = "auto",
) -> HostEnvironment:
  """Loads an environment and tools; ValueError if they are invalid.

  `path` is one of `ENVIRONMENTS`, "gymnasium:ID", "file.py", "file.py:Name" or
  "package.module:Name", or empty if there are only `tools`. Each tool is
  "file.py:function" or "package.module:function". `tool_format` is a key of
  `tools.TOOL_CALLS`; `action`, for classes, is one of `spaces.ACTIONS`.
  """
  named = []
  for tool in tools:
    function = load(f"tool {tool!r}", tool, {})
    _check(f"tool {tool!r}", function, is_tool=True)
    # The schema, and so the model, uses the function's own name.
    named.append((getattr(function, "__name__", label(tool)), function))
  functions = dict(named)
  subject = f"environment {path!r}"
  options = dict(options or {})

  def use_tools(action: str, methods: Functions) -> Step:
    calls = tools_lib.TOOL_CALLS[tool_format](action)
    return to_step(tools_lib.answer(calls, functions | methods))

  if not path:
    if not functions or options:
      raise ValueError("environment: set path or tools; options need a path")
    environment = _from_tools(lambda action: use_tools(action, {}))
  elif path.startswith("gymnasium:"):
    environment = _from_gymnasium(subject, path, options, action)
  elif isinstance(target := load(subject, path, ENVIRONMENTS), type):
    environment = _from_class(subject, target, options, use_tools, action)
  else:
    environment = _from_object(subject, target, options)
  if action != "auto" and (not environment.end or environment.functions):
    raise ValueError(
      f"environment.action = {action!r} needs a class with `reset` and `step`:"
      f" {subject} reads the turns itself, so use 'auto'"
    )
  if path and functions and not environment.functions:
    raise ValueError(
      f"{subject} reads the model's turns itself: remove environment.tools or"
      " environment.path, or use a class like TRL's"
    )
  if path in ENVIRONMENTS:
    environment.step(None, "", {"answer": "1"}, 0)  # raises for bad options
  named += environment.functions.items()
  names = [name for name, _ in named]
  if twice := [name for name in names if names.count(name) > 1]:
    raise ValueError(
      f"two tools have the name {twice[0]!r} (environment.tools or methods of"
      " the environment): rename one"
    )
  return environment._replace(functions=dict(named))


def _check(
  subject: str,
  function: Any,
  arguments: Mapping | None = None,
  is_tool: bool = False,
) -> None:
  """Raises ValueError if a function cannot be called with these arguments.

  A tool must take all its arguments by name, because models name them.
  """
  if not callable(function):
    raise ValueError(f"{subject} is not a function: name or define one")
  if is_tool:
    arguments = inspect.signature(function).parameters
  else:
    refuse_asynchronous(subject, function, "steps")
  try:
    if arguments is not None:
      inspect.signature(function).bind(**arguments)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{subject} cannot be called with {[*arguments]}: {error}"
    ) from error


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict:
  """Returns the values for which a function has parameters."""
  named, takes_any = by_keyword(function)
  return {k: v for k, v in values.items() if takes_any or k in named}


def _from_tools(use_tools: Callable[[str], Step]) -> HostEnvironment:
  """Returns an environment of tools alone; its state counts the turns."""

  def step(state: int | None, action: str, example: Any, seed: int) -> Step:
    turn = state or 0
    with seeded(seed, turn):
      return use_tools(action)._replace(state=turn + 1)

  return HostEnvironment(lambda example, seed: Step(), step)


def _from_gymnasium(
  subject: str, path: str, options: dict[str, Any], action: str
) -> HostEnvironment:
  """Returns a gymnasium environment whose reset also explains the actions."""
  try:
    import gymnasium

    make = functools.partial(gymnasium.make, path.partition(":")[2], **options)
    environment = make()
  except Exception as error:
    missing = isinstance(error, ModuleNotFoundError)
    hint = ": pip install gymnasium" if missing else ""
    raise ValueError(f"{subject} cannot be made: {error}{hint}") from error
  about = spaces.instructions(environment, action)
  replay.close(environment)

  class WithInstructions(gymnasium.Wrapper):
    def __init__(self):
      super().__init__(make())

    def reset(self, **arguments):
      first, _ = super().reset(**arguments)
      return f"{about}\n\nObservation: {spaces.observation(first)}"

  no_tools = lambda action, methods: Step(done=True)
  return _from_class(subject, WithInstructions, {}, no_tools, action)


def _from_object(subject: str, target: Any, options: dict) -> HostEnvironment:
  reset = getattr(target, "reset", lambda: Step())
  step = getattr(target, "step", None)
  if not callable(step):
    raise ValueError(
      f"{subject} is a {type(target).__name__} without a function `step`: write"
      " `def step(state, action, example)`, or name a class as file.py:Name"
    )
  for_reset = _accepted(reset, options)
  for_step = _accepted(step, options)
  # The check of `step` refuses options that neither function accepts.
  for_step |= {k: options[k] for k in options if k not in for_reset}
  return HostEnvironment(
    _by_name(f"{subject}: reset", reset, "example seed", for_reset),
    _by_name(f"{subject}: step", step, "state action example seed", for_step),
  )


def _by_name(
  subject: str,
  function: Callable[..., Any],
  names: str,
  options: dict[str, Any],
) -> Callable[..., Step]:
  """Wraps a function to ignore the `names` that it has no parameters for."""
  arguments = _accepted(function, dict.fromkeys(names.split()))
  if both := [name for name in arguments if name in options]:
    raise ValueError(
      f"environment.options.{both[0]}: {subject} gets {both[0]!r} from the run,"
      " so rename the option"
    )
  _check(subject, function, arguments | options)

  def call(*values: Any) -> Step:
    by_name = dict(zip(names.split(), values, strict=True))
    arguments = _accepted(function, by_name)
    with seeded(*(by_name[name] for name in by_name if name != "example")):
      return to_step(function(**arguments, **options))

  return call


def _from_class(
  subject: str,
  kind: type,
  options: dict[str, Any],
  use_tools: Callable[[str, Functions], Step],
  form: str,
) -> HostEnvironment:
  _check(subject, kind, options)
  methods = dict(inspect.getmembers(kind, inspect.isroutine))
  excluded = ("reset", "get_reward", "close")
  names = [name for name in methods if name[0] != "_" and name not in excluded]
  tools = {name: methods[name] for name in names}
  if "reset" not in methods or not tools:
    raise ValueError(
      f"{subject} needs `reset` and `step` (like gymnasium), or `reset` and"
      " methods with docstrings as tools (like TRL)"
    )
  returned = getattr(tools.get("step"), "__annotations__", {}).get("return")
  if "step" in tools and returned not in (str, "str"):
    tools = {}
  for name in ("reset", *([] if tools else ["step"])):
    _check(f"{subject}: {name}", methods[name])

  def begin(example: dict[str, Any], seed: int) -> tuple[Any, Step]:
    instance = kind(**options)
    values = example if tools else {"seed": seed, "options": example}
    with replay.closed_on_error(instance):
      value = instance.reset(**_accepted(instance.reset, values))
      pair = isinstance(value, tuple) and len(value) == 2
      if pair and isinstance(value[1], Mapping):
        value, _ = value  # gymnasium returns (observation, info)
      has_fields = is_step(value) or _is_result(value)
      return instance, _read(value if has_fields else Step(value))

  reward = None
  if tools and "get_reward" in methods:
    reward = lambda instance: tools_lib.awaited(instance.get_reward())

  def act(instance: Any, action: str) -> Step:
    if not tools:
      space = getattr(instance, "action_space", None)
      try:
        value = spaces.read_action(action, form, space)
      except spaces.IllegalAction as error:
        return to_step(Step(str(error), info={"illegal_actions": 1}))
      return _read(instance.step(value))
    step = use_tools(action, {name: getattr(instance, name) for name in tools})
    if step.done and reward:
      step = to_step(step._replace(reward=reward(instance)))
    return step

  described = dict(tools)
  for name, method in tools.items():
    if "self" in inspect.signature(method).parameters:  # models omit self
      described[name] = types.MethodType(method, object())
    _check(f"{subject}: {name}", described[name], is_tool=True)
  play = replay.Replay(begin, act, reward)
  return HostEnvironment(play.reset, play.step, described, play.end, play.close)


def _read(value: Any) -> Step:
  if is_step(value):
    value = Step(**value)
  elif _is_result(value):
    seen = getattr(value, "observation", value)
    info = getattr(value, "info", {})
    value = Step(seen, value.reward, value.done, info=info)
  elif isinstance(value, tuple) and len(value) in (4, 5):
    observation, reward, *ends, info = value
    done = next(filter(None, ends), False)  # terminated or truncated
    value = Step(observation, reward, done, info=info)
  if isinstance(value, Step):
    value = value._replace(observation=spaces.observation(value.observation))
  return to_step(value)


def _is_result(value: Any) -> bool:
  """Returns True for objects like a Step or OpenEnv's result or observation."""
  return hasattr(value, "reward") and hasattr(value, "done")
