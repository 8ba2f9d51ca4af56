"""Reward functions in the conventions of TRL and verl.

The names of a function's parameters say which convention it follows:

| a parameter is named                     | it is called as                   |
|------------------------------------------|-----------------------------------|
| prompts, completions or completion_ids   | TRL calls `reward_funcs`          |
| solution_str                             | verl calls `compute_score`        |
| none of them, and it takes three         | (prompt, completion, example)     |

A function gets by keyword the arguments that it has parameters for, and all of
them with `**kwargs`; options of `reward.options.FUNCTION` replace columns.

TRL: one call for all completions of a prompt. Each is a text or, if the prompt
is a list of messages, a list of one message. Prompts end in the observation of
an environment's reset; completion_ids have their EOS; trainer_state has
global_step (steps done) and max_steps; log_extra is ignored; other columns of
the data are lists. It returns as many numbers; None abstains.

verl: one call for each completion; ground_truth is
reward_model["ground_truth"], else the columns ground_truth or answer;
extra_info is {} by default. It returns a number, or a dict with "score" whose
other numbers are logged.
"""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.data.examples import READ, SOURCE

TRL = ("prompts", "completions", "completion_ids")
VERL = ("solution_str",)
OURS = ("prompt", "completion", "example")

STATE = "trainer_state"
IDS = "completion_ids"

_TRL_GIVES = (*TRL, STATE, "log_metric", "log_extra")
_NO_COLUMN = ("prompt", READ, "completion", *_TRL_GIVES)
_ADDED = "prompt_text completion_length max_completion_length finished".split()

Item = tuple[str, str, dict[str, Any]]
"""A prompt's text, a completion, and the example."""


class _Function(NamedTuple):
  """A user's function."""

  function: Callable[..., Any]  # the user's, with its options bound
  # Names of its parameters that are not bound; None is any.
  takes: Collection[str] | None
  needs: Sequence[str]  # those of them without a default

  def call(self, arguments: dict[str, Any]) -> Any:
    """Calls it with the arguments that it has parameters for."""
    if self.takes is not None:
      arguments = {k: v for k, v in arguments.items() if k in self.takes}
    return self.function(**arguments)


class Verl(_Function):
  """A function of verl's convention; its calls have the form of ours."""

  def __call__(
    self, prompt: str, completion: str, example: dict[str, Any]
  ) -> Any:
    """Returns a number, None, or a dict with "score"."""
    return self.call(self.columns(example) | {"solution_str": completion})

  @staticmethod
  def columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that an example provides."""
    info = example.get("extra_info") or {}
    columns = {"extra_info": dict(info) if isinstance(info, Mapping) else info}
    if SOURCE in example:
      columns[SOURCE] = example[SOURCE]
    model = example.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
      columns["ground_truth"] = model["ground_truth"]
    elif "ground_truth" in example or "answer" in example:
      truth = example.get("ground_truth", example.get("answer"))
      columns["ground_truth"] = truth
    return columns


class Trl(_Function):
  """A function of TRL's convention: one call for all samples of a prompt."""

  def __call__(self, items: Sequence[Item]) -> list[Any]:
    """Returns for each completion of one prompt a number, None, or a dict."""
    examples = [example for _, _, example in items]
    prompts = [
      example.get(READ, example.get("prompt", text))
      for text, _, example in items
    ]
    texts = [completion for _, completion, _ in items]
    if isinstance(prompts[0], list):  # a conversation
      texts = [[{"role": "assistant", "content": text}] for text in texts]
    metrics: dict[str, float] = {}

    def log_metric(name, value):
      metrics[name] = value

    state = examples[0].get(STATE)
    if not isinstance(state, Mapping):  # a column of the data's
      state = {"global_step": 0, "max_steps": 0}
    arguments = {
      name: [example[name] for example in examples]
      for name in self.columns(examples[0])
    }
    arguments |= {
      "prompts": prompts,
      "completions": texts,
      IDS: [example.get(IDS) for example in examples],
      STATE: types.SimpleNamespace(**state),
      "log_metric": log_metric,
      "log_extra": lambda column, values: None,
    }
    values = self.call(arguments)
    unordered = str, bytes, Mapping, set, frozenset
    if isinstance(values, unordered) or not hasattr(values, "__iter__"):
      raise TypeError(
        f"it returned {type(values).__name__}, no list of rewards"
      )
    if not metrics:
      return list(values)
    as_dict = lambda v: v if isinstance(v, Mapping) else {"score": v}
    return [v if v is None else metrics | as_dict(v) for v in values]

  @staticmethod
  def columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that an example provides."""
    return {k: v for k, v in example.items() if k not in _NO_COLUMN}


def follow(
  name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
  """Binds a function's options; wraps TRL's as `Trl` and verl's as `Verl`.

  ValueError if it mixes or lacks conventions, does not take an option, is
  asynchronous or cannot be called by keywords.
  """
  refuse_asynchronous(f"reward {name!r}", function, "rewards")
  bound = functools.partial(function, **options) if options else function
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some functions that are written in C
    return bound
  parameters = signature.parameters
  kind = _convention(name, parameters)
  named, free = by_keyword(function)
  if kind is None:
    first = list(parameters.values())[:3]
    reserved = [p.name for p in first if p.kind is p.POSITIONAL_OR_KEYWORD]
  else:
    reserved = _TRL_GIVES if kind is Trl else VERL
  known = [key for key in named if key not in reserved]
  for key in options:
    if key in reserved or not (free or key in known):
      raise ValueError(
        f"reward {name!r} has no option {key!r}: it takes {known or 'none'}"
        f"{nearest(key, known)}"
      )
  if kind is None:
    try:
      signature.bind("", "", {}, **options)
    except TypeError as error:
      raise ValueError(
        f"reward {name!r} cannot be called with prompt, completion, example and"
        f" the options {options}: {error} (TRL's convention is known by a"
        " parameter `completions`, verl's by one `solution_str`)"
      ) from error
    return bound
  if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
    raise ValueError(
      f"reward {name!r}: {kind.__name__.upper()}'s convention passes all by"
      " keywords, and it has parameters that take none"
    )
  takes = [key for key in named if key not in options]
  default = {key: p.default for key, p in parameters.items()}
  required = [k for k in takes if default[k] is inspect.Signature.empty]
  needs = [key for key in required if key not in reserved]
  return kind(bound, None if free else takes, needs)


def refuse_asynchronous(subject: str, function: Any, kind: str) -> None:
  """Raises ValueError for a coroutine function that computes a `kind`."""
  call = getattr(function, "__call__", None)  # noqa: B004
  if any(map(inspect.iscoroutinefunction, (function, call))):
    raise ValueError(
      f"{subject} is asynchronous, and {kind} run one after another in each"
      " worker: write `def` and asyncio.run(...) inside of it"
    )


def by_keyword(function: Callable[..., Any]) -> tuple[list[str], bool]:
  """Names that a function takes by keyword, and if it takes any others."""
  parameters = inspect.signature(function).parameters.values()
  named = [
    p.name
    for p in parameters
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def nearest(name: str, candidates: Collection[str]) -> str:
  """Returns "; did you mean ...?", or "" if no name is near."""
  close = difflib.get_close_matches(name, candidates, 1)
  return f"; did you mean {close[0]!r}?" if close else ""


def _convention(
  name: str, parameters: Collection[str]
) -> type[Verl] | type[Trl] | None:
  """Recognizes a convention by names of parameters; None for ours."""
  kinds = {"TRL's": TRL, "verl's": VERL, "grpojax's own": OURS}
  marks = {}
  for kind, names in kinds.items():
    if named := [key for key in parameters if key in names]:
      marks[kind] = named[0]
  if len(marks) > 1:
    both = " and ".join(f"{key!r} ({kind})" for kind, key in marks.items())
    raise ValueError(
      f"reward {name!r} has parameters of two conventions, {both}: rename one,"
      " or wrap it in `def reward(prompt, completion, example)`"
    )
  return {"TRL's": Trl, "verl's": Verl}.get(next(iter(marks), ""))


def check_columns(
  name: str, reward: Callable[..., Any], example: Mapping[str, Any], data: str
) -> None:
  """Raises ValueError if an example lacks a column that a function needs.

  `reward` comes from `functions.resolve`; `data` names the data set in errors.
  """
  if not isinstance(reward, (Verl, Trl)):
    return
  there = reward.columns(example)
  missing = [k for k in reward.needs if k not in there and k not in _ADDED]
  if missing:
    label = name.rpartition(":")[2]
    raise ValueError(
      f"reward {name!r} needs {missing[0]!r}, and {data} has only"
      f" {', '.join(sorted(example))}: add that column, or give it one value by"
      f" reward.options.{label}.{missing[0]}=..."
    )


def wants(reward: Callable[..., Any], name: str) -> bool:
  """True if a function takes an input that is costly to bring: IDS, STATE."""
  return isinstance(reward, Trl) and (
    reward.takes is None or name in reward.takes
  )
