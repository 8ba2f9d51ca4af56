"""Reward functions in the conventions of TRL and verl.

The convention follows from a function's parameter names:

| parameters                               | called like                       |
|------------------------------------------|-----------------------------------|
| prompts, completions or completion_ids   | TRL's `reward_funcs`              |
| solution_str                             | verl's `compute_score`            |
| three with other names                   | (prompt, completion, example)     |

Arguments of TRL and verl are passed by keyword if the function has a parameter
for them or `**kwargs`; options in `reward.options.FUNCTION` override columns.

TRL: one call per prompt, with all its completions. A completion is a text or,
if the prompt is a list of messages, a list with one message. Prompts include
the observation of an environment's reset; completion_ids include the EOS;
trainer_state has global_step (steps done) and max_steps; log_extra is ignored;
other columns are lists with a value per completion. The result is a number per
completion; None abstains.

verl: one call per completion. ground_truth is reward_model["ground_truth"],
else the column ground_truth or answer; extra_info is {} by default. The result
is a number, or a dict with "score" and other numbers to log.
"""

import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.data.examples import READ, SOURCE
from grpojax.runtime.processes.user_calls import nearest

TRL = ("prompts", "completions", "completion_ids")
VERL = ("solution_str",)
OURS = ("prompt", "completion", "example")

CORRECT = 1.0  # minimum reward of a correct completion
STATE = "trainer_state"
IDS = "completion_ids"

_TRL_ARGUMENTS = (*TRL, STATE, "log_metric", "log_extra")
_NO_COLUMNS = ("prompt", READ, "completion", *_TRL_ARGUMENTS)
# Columns that the run adds to examples later.
_LATER = "prompt_text completion_length max_completion_length finished".split()

Item = tuple[str, str, dict[str, Any]]  # (prompt text, completion, example)


class _Function(NamedTuple):
  """A user function with its parameters."""

  function: Callable[..., Any]  # with its options bound
  takes: Collection[str] | None  # names of unbound parameters; None: any name
  needs: Sequence[str]  # columns for unbound parameters without a default

  def call(self, arguments: dict[str, Any]) -> Any:
    """Calls the function with the arguments for which it has parameters."""
    if self.takes is not None:
      arguments = {k: v for k, v in arguments.items() if k in self.takes}
    return self.function(**arguments)


class Verl(_Function):
  """A function in verl's convention."""

  def __call__(
    self, prompt: str, completion: str, example: dict[str, Any]
  ) -> Any:
    """Returns the reward of a completion, as grpojax's own functions do."""
    return self.call(self.columns(example) | {"solution_str": completion})

  @staticmethod
  def columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that come from columns of an example."""
    columns = {"extra_info": example.get("extra_info") or {}}
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
  """A function in TRL's convention, called once for all items of a prompt."""

  def __call__(self, items: Sequence[Item]) -> list[Any]:
    """Returns a number, None or a dict per completion."""
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
    if not isinstance(state, Mapping):  # missing, or a data column
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
    not_lists = str, bytes, Mapping, set, frozenset
    if isinstance(values, not_lists) or not hasattr(values, "__iter__"):
      raise TypeError(
        f"returned {type(values).__name__} instead of a list of rewards"
      )
    if not metrics:
      return list(values)
    as_dict = lambda v: v if isinstance(v, Mapping) else {"score": v}
    return [v if v is None else metrics | as_dict(v) for v in values]

  @staticmethod
  def columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that come from columns of an example."""
    return {k: v for k, v in example.items() if k not in _NO_COLUMNS}


def follow(
  name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
  """Binds options to a function and wraps it in `Trl` or `Verl` if needed.

  ValueError if no or two conventions fit, for unknown options, or if async.
  """
  refuse_asynchronous(f"reward {name!r}", function, "rewards")
  bound = functools.partial(function, **options) if options else function
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some functions written in C
    return bound
  parameters = signature.parameters
  kind = _convention(name, parameters)
  named, free = by_keyword(function)
  if kind is None:
    first = list(parameters.values())[:3]
    reserved = [p.name for p in first if p.kind is p.POSITIONAL_OR_KEYWORD]
  else:
    reserved = _TRL_ARGUMENTS if kind is Trl else VERL
  known = [key for key in named if key not in reserved]
  for key in options:
    if key in reserved or not (free or key in known):
      raise ValueError(
        f"reward {name!r} has no option {key!r}: its options are {known}"
        f"{nearest(key, known)}"
      )
  if kind is None:
    try:
      signature.bind("", "", {}, **options)
    except TypeError as error:
      bound_too = f" and the options {options}" if options else ""
      raise ValueError(
        f"reward {name!r} cannot be called with prompt, completion, example"
        f"{bound_too}: {error} (functions for TRL have a parameter"
        " `completions`, functions for verl `solution_str`)"
      ) from error
    return bound
  if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
    raise ValueError(
      f"reward {name!r} has positional-only parameters: remove the `/`, since"
      f" {kind.__name__.upper()}'s convention passes keywords"
    )
  takes = [key for key in named if key not in options]
  default = {key: p.default for key, p in parameters.items()}
  required = [k for k in takes if default[k] is inspect.Signature.empty]
  needs = [key for key in required if key not in reserved]
  return kind(bound, None if free else takes, needs)


def refuse_asynchronous(subject: str, function: Any, kind: str) -> None:
  """Raises ValueError for a coroutine function; `kind` names its results."""
  call = getattr(function, "__call__", None)  # noqa: B004
  if any(map(inspect.iscoroutinefunction, (function, call))):
    raise ValueError(
      f"{subject} is asynchronous, but a worker computes {kind} one by one:"
      " write `def` instead, and call asyncio.run(...) inside"
    )


def by_keyword(function: Callable[..., Any]) -> tuple[list[str], bool]:
  """Returns names of keyword parameters, and True if there is a **kwargs."""
  parameters = inspect.signature(function).parameters.values()
  named = [
    p.name
    for p in parameters
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _convention(
  name: str, parameters: Collection[str]
) -> type[Verl] | type[Trl] | None:
  """Returns `Trl`, `Verl` or, for grpojax's own convention, None."""
  kinds = {"TRL's": TRL, "verl's": VERL, "grpojax's own": OURS}
  marks = {}
  for kind, names in kinds.items():
    if named := [key for key in parameters if key in names]:
      marks[kind] = named[0]
  if len(marks) > 1:
    both = " and ".join(f"{key!r} ({kind})" for kind, key in marks.items())
    raise ValueError(
      f"reward {name!r} has parameters of two conventions, {both}: rename one"
      " of them, or call it from a `def reward(prompt, completion, example)`"
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
  present = [*reward.columns(example), *_LATER]
  for key in reward.needs:
    if key not in present:
      raise ValueError(
        f"reward {name!r} needs {key!r}, but {data} has only"
        f" {', '.join(sorted(example))}: add the column, or set a constant with"
        f" reward.options.{name.rpartition(':')[2]}.{key}=..."
      )
