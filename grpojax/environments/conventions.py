"""Environments in the conventions of several libraries.

| the path names                             | it is taken as                |
|--------------------------------------------|-------------------------------|
| a module or object with `step`             | ours: plain functions         |
| a class with `reset` and `step`, or        | gymnasium's, OpenEnv's client |
| "gymnasium:ID"                             |                               |
| a class with `reset`, and no `step` or one | TRL's environment_factory     |
| that returns `str`                         |                               |
| no path, and functions as tools            | TRL's tools                   |

Functions get by name the arguments that they have parameters for: ours state,
action, example, seed and options; `reset` of gymnasium's seed, and the example
as options; TRL's the example's columns. A constructor gets options.

gymnasium's `step(action)` gets the turn's text, or the number or JSON in it, as
`spaces` reads it, and returns a tuple of 5 or 4, or an object with reward and
done. TRL's public methods are tools; a turn without calls ends the episode,
with the reward of `get_reward` or 0; so does a cut. Tools, `get_reward` and
`close` may be asynchronous.
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
from grpojax.rewards.functions import label, load

ENVIRONMENTS = {"retry": "grpojax.environments.retry"}
"""Environments that come along, and the module of each."""

Functions = dict[str, Callable[..., Any]]


class HostEnvironment(NamedTuple):
  """An environment as its workers call it."""

  # `(example, seed) -> Step`, the beginning of an episode.
  reset: Callable[[dict[str, Any], int], Step]
  # `(state, action, example, seed) -> Step`, the answer to a turn's text.
  step: Callable[[Any, str, dict[str, Any], int], Step]
  functions: Functions = {}  # tools that the model may call, by name
  # `(state, example, seed) -> Step`, called for an episode that is cut off,
  # whose instance it closes; None without instances: states are not those of
  # `replay`.
  end: Callable[[Any, dict[str, Any], int], Step] | None = None
  close: Callable[[], None] = lambda: None  # of all instances

  @property
  def tools(self) -> list[dict[str, Any]]:
    """JSON schemas for the chat template; ValueError for a tool without one."""
    return tools_lib.schemas(list(self.functions.values()))


def resolve(
  path: str,
  tools: Sequence[str] = (),
  options: Mapping[str, Any] | None = None,
  tool_format: str = "hermes",
  action: str = "auto",
) -> HostEnvironment:
  """Makes functions of an environment and tools; ValueError if it cannot.

  `path` is one of `ENVIRONMENTS`, "gymnasium:ID", "file.py", "file.py:Name" or
  "package.module:Name", or empty if there are only `tools`, named alike.
  `tool_format` is one of `tools.TOOL_CALLS`, the form of the model's calls;
  `action`, for classes, is one of `spaces.ACTIONS`.
  """
  named = []
  for tool in tools:
    function = load(f"tool {tool!r}", tool, {})
    _check(f"tool {tool!r}", function, is_tool=True)
    # The schema's name.
    named.append((getattr(function, "__name__", label(tool)), function))
  functions = dict(named)
  subject, options = f"environment {path!r}", dict(options or {})

  def use_tools(action: str, own: Functions) -> Step:
    calls = tools_lib.TOOL_CALLS[tool_format](action)
    return to_step(tools_lib.answer(calls, functions | own))

  if not path:
    if not functions or options:
      raise ValueError("environment: give its path, or tools without options")
    environment = _of_tools(lambda action: use_tools(action, {}))
  elif path.startswith("gymnasium:"):
    environment = _of_gymnasium(subject, path, options, action)
  elif isinstance(target := load(subject, path, ENVIRONMENTS), type):
    environment = _of_class(subject, target, options, use_tools, action)
  else:
    environment = _ours(subject, target, options)
  if action != "auto" and (not environment.end or environment.functions):
    raise ValueError(
      f"environment.action = {action!r} is for a class with `reset` and `step`,"
      f" and {subject} reads the turns itself: use 'auto'"
    )
  if path and functions and not environment.functions:
    raise ValueError(
      f"{subject} reads the model's turns itself: environment.tools are for"
      " classes of TRL's kind, or go without environment.path"
    )
  if path in ENVIRONMENTS:
    environment.step(None, "", {"answer": "1"}, 0)  # refuses options' values
  named += environment.functions.items()
  names = [name for name, _ in named]
  if twice := [name for name in names if names.count(name) > 1]:
    raise ValueError(
      f"two tools are called {twice[0]!r}, by environment.tools or as a method"
      " of the environment: rename one"
    )
  return environment._replace(functions=dict(named))


def _check(
  subject: str,
  function: Any,
  arguments: Mapping | None = None,
  is_tool: bool = False,
) -> None:
  """Raises ValueError if a function cannot be called with these arguments.

  A tool must take all its own by name, as models give them.
  """
  if not callable(function):
    raise ValueError(f"{subject} is no function")
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


def _taken(function: Callable[..., Any], values: dict[str, Any]) -> dict:
  """The values that a function has parameters for."""
  named, takes_any = by_keyword(function)
  return {k: v for k, v in values.items() if takes_any or k in named}


def _of_tools(use_tools: Callable[[str], Step]) -> HostEnvironment:
  """Returns the environment of tools alone; its state counts the turns."""

  def step(state: int | None, action: str, example: Any, seed: int) -> Step:
    turn = state or 0
    with seeded(seed, turn):
      return use_tools(action)._replace(state=turn + 1)

  return HostEnvironment(lambda example, seed: Step(), step)


def _of_gymnasium(
  subject: str, path: str, options: dict[str, Any], action: str
) -> HostEnvironment:
  """Returns gymnasium's environment of an ID; it first shows legal actions."""
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

  class Named(gymnasium.Wrapper):
    def __init__(self):
      super().__init__(make())

    def reset(self, **arguments):
      first, _ = super().reset(**arguments)
      return f"{about}\n\nObservation: {spaces.observation(first)}"

  no_tools = lambda action, own: Step(done=True)
  return _of_class(subject, Named, {}, no_tools, action)


def _ours(subject: str, target: Any, options: dict) -> HostEnvironment:
  """The environment of a module or an object."""
  reset = getattr(target, "reset", lambda: Step())
  step = getattr(target, "step", None)
  if not callable(step):
    raise ValueError(
      f"{subject} is a {type(target).__name__} without a function `step`: write"
      " `def step(state, action, example)`, or give a class as file.py:Name"
    )
  of_reset = _taken(reset, options)
  of_step = _taken(step, options)
  # `step` has to take what `reset` does not.
  of_step |= {k: options[k] for k in options if k not in of_reset}
  return HostEnvironment(
    _by_name(f"{subject}: reset", reset, "example seed", of_reset),
    _by_name(f"{subject}: step", step, "state action example seed", of_step),
  )


def _by_name(
  subject: str,
  function: Callable[..., Any],
  names: str,
  options: dict[str, Any],
) -> Callable[..., Step]:
  """A function of values with these names, which passes on those it takes."""
  arguments = _taken(function, dict.fromkeys(names.split()))
  if both := [name for name in arguments if name in options]:
    raise ValueError(
      f"{subject} gets {both[0]!r} from the run, so"
      f" environment.options.{both[0]} cannot be given: rename the option"
    )
  _check(subject, function, arguments | options)

  def call(*values: Any) -> Step:
    by_name = dict(zip(names.split(), values, strict=True))
    arguments = _taken(function, by_name)
    with seeded(*(by_name[name] for name in by_name if name != "example")):
      return to_step(function(**arguments, **options))

  return call


def _of_class(
  subject: str,
  kind: type,
  options: dict[str, Any],
  use_tools: Callable[[str, Functions], Step],
  form: str,
) -> HostEnvironment:
  """Returns the environment of a class, with its own tools if it is TRL's."""
  _check(subject, kind, options)
  methods = dict(inspect.getmembers(kind, inspect.isroutine))
  no_tools = ("reset", "get_reward", "close")
  own = {k: v for k, v in methods.items() if k[0] != "_" and k not in no_tools}
  if "reset" not in methods or not own:
    raise ValueError(
      f"{subject} has neither `reset` and `step` (gymnasium's), nor `reset` and"
      " methods with docstrings, which are tools (TRL's)"
    )
  returned = getattr(own.get("step"), "__annotations__", {}).get("return")
  if "step" in own and returned not in (str, "str"):
    own = {}
  for name in ("reset", *([] if own else ["step"])):
    _check(f"{subject}: {name}", methods[name])

  def begin(example: dict[str, Any], seed: int) -> tuple[Any, Step]:
    instance = kind(**options)
    values = example if own else {"seed": seed, "options": example}
    with replay.closed_on_error(instance):
      value = instance.reset(**_taken(instance.reset, values))
      return instance, _read_reset(value)

  reward = None
  if own and "get_reward" in methods:
    reward = lambda instance: tools_lib.awaited(instance.get_reward())

  def act(instance: Any, action: str) -> Step:
    if not own:
      return _act(instance, action, form)
    step = use_tools(action, {name: getattr(instance, name) for name in own})
    if step.done and reward:
      step = to_step(step._replace(reward=reward(instance)))
    return step

  described = dict(own)
  for name, method in own.items():
    if "self" in inspect.signature(method).parameters:  # which is no argument
      described[name] = types.MethodType(method, object())
    _check(f"{subject}: {name}", described[name], is_tool=True)
  play = replay.Replay(begin, act, reward)
  return HostEnvironment(play.reset, play.step, described, play.end, play.close)


def _act(instance: Any, text: str, form: str) -> Step:
  """Steps an instance of gymnasium's kind by a turn's text."""
  space = getattr(instance, "action_space", None)
  try:
    action = spaces.read_action(text, form, space)
  except spaces.IllegalAction as error:
    return to_step(Step(str(error), info={"illegal_actions": 1}))
  return _read(instance.step(action))


def _read_reset(value: Any) -> Step:
  """Returns the Step of what a class's `reset` returns."""
  if isinstance(value, tuple) and len(value) == 2:
    first, info = value
    value = first if isinstance(info, Mapping) else value
  return _read(value if is_step(value) or _is_result(value) else Step(value))


def _read(value: Any) -> Step:
  """Returns the Step of what a class's `step` returns."""
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
  """Returns True for a Step, and for OpenEnv's results and observations."""
  return hasattr(value, "reward") and hasattr(value, "done")
