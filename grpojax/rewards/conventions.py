"""Reward functions as users of TRL and verl write them, run as they are.

Which convention a function follows is said by the names of its parameters:

| a parameter is named                     | it is called as                   |
|------------------------------------------|-----------------------------------|
| prompts, completions or completion_ids   | TRL calls `reward_funcs`          |
| solution_str                             | verl calls `compute_score`        |
| none of them, and it takes three         | (prompt, completion, example)     |

Names of two conventions in one function are an error. A function is given what
it has a parameter for, and all there is where it has `**kwargs`.

TRL: once for all completions of a prompt, by keywords: prompts; completions,
each a text, or where the prompt is a list of messages a list of one message of
the assistant; completion_ids, with their EOS; trainer_state, with global_step
(steps done) and max_steps; log_metric; log_extra, which keeps nothing; and the
data's other columns, each a list. It returns as many numbers; None abstains.

verl: once a completion, by keywords: solution_str; ground_truth, which is
reward_model["ground_truth"], else the columns ground_truth or answer;
data_source; extra_info, {} where the data have none. It returns a number, or a
dict with "score" whose other numbers are logged.

What is named in `reward.options.FUNCTION` is passed as it is, instead of a
column. Neither may be `async`.
"""

import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.data.examples import SOURCE

TRL = ("prompts", "completions", "completion_ids")
VERL = ("solution_str",)
OURS = ("prompt", "completion", "example")

STATE = "trainer_state"
IDS = "completion_ids"

_TRL_GIVES = (*TRL, STATE, "log_metric", "log_extra")
_NO_COLUMN = ("prompt", "completion", *_TRL_GIVES)
_ADDED = ("prompt_text", "completion_length", "max_completion_length")
_ADDED += ("finished",)

Item = tuple[str, str, dict[str, Any]]
"""A prompt's text, a completion, and the example."""


class Verl(NamedTuple):
  """A function of verl's convention, called as ours are.

  Attributes:
    function: with its options bound.
    takes: names of its parameters that are not bound; None is any.
    needs: those of them without a default.
  """

  function: Callable[..., Any]
  takes: Collection[str] | None
  needs: Sequence[str]

  def __call__(
    self, prompt: str, completion: str, example: dict[str, Any]
  ) -> Any:
    """What the function returns: a number, None, or a dict with "score"."""
    given = self.columns(example) | {"solution_str": completion}
    return self.function(**_taken(self, given))

  @staticmethod
  def columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """What the function can be given of an example."""
    names = (SOURCE, "answer", "ground_truth")
    found = {name: example[name] for name in names if name in example}
    if "answer" in found:
      found = {"ground_truth": found.pop("answer")} | found
    model = example.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
      found["ground_truth"] = model["ground_truth"]
    return found | {"extra_info": dict(example.get("extra_info") or {})}


class Trl(NamedTuple):
  """A function of TRL's convention: all completions of a prompt in one call.

  Attributes:
    function: see `Verl`, as for the next two.
    takes: likewise.
    needs: likewise.
    sources: the data sets of a mixture that it scores; None is all.
  """

  function: Callable[..., Any]
  takes: Collection[str] | None
  needs: Sequence[str]
  sources: Sequence[str] | None = None

  def __call__(self, items: Sequence[Item]) -> list[Any]:
    """A value for each item: a number, None, or a dict with "score".

    Args:
      items: of one prompt, so that their examples have the same columns.

    Raises:
      TypeError: it returns no list.
      Exception: what the function raises.
    """
    examples = [example for _, _, example in items]
    if self.sources is not None and examples[0].get(SOURCE) not in self.sources:
      return [None] * len(items)
    prompts = [example.get("prompt", text) for text, _, example in items]
    texts = [completion for _, completion, _ in items]
    if isinstance(prompts[0], list):  # a conversation
      texts = [[{"role": "assistant", "content": text}] for text in texts]
    metrics: dict[str, float] = {}
    state = {"global_step": 0, "max_steps": 0} | examples[0].get(STATE, {})
    given = {
      name: [example[name] for example in examples]
      for name in self.columns(examples[0])
    }
    given |= {
      "prompts": prompts,
      "completions": texts,
      IDS: [example.get(IDS) for example in examples],
      STATE: types.SimpleNamespace(**state),
      "log_metric": metrics.__setitem__,
      "log_extra": lambda column, values: None,
    }
    values = self.function(**_taken(self, given))
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__iter__"):
      raise TypeError(
        f"it returned {type(values).__name__}, no list of rewards"
      )
    if not metrics:
      return list(values)
    return [v if v is None else metrics | {"score": v} for v in values]

  @staticmethod
  def columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """What the function can be given of an example."""
    return {k: v for k, v in example.items() if k not in _NO_COLUMN}


def _taken(reward: Verl | Trl, given: Mapping[str, Any]) -> dict[str, Any]:
  takes = given if reward.takes is None else reward.takes
  return {name: value for name, value in given.items() if name in takes}


def follow(
  name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Verl | Trl | None:
  """The function by the convention that it follows.

  Args:
    name: of the function, for errors.
    function: as the user wrote it.
    options: keyword arguments to bind.

  Returns:
    None where it follows ours.

  Raises:
    ValueError: its parameters are of two conventions, an option is none of
      them, or it is asynchronous or cannot be called by keywords.
  """
  call = getattr(function, "__call__", None)  # noqa: B004
  if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
    raise ValueError(
      f"reward {name!r} is asynchronous, and rewards run one after another in"
      " each worker: write `def` and asyncio.run(...) inside of it"
    )
  try:
    parameters = inspect.signature(function).parameters
  except ValueError:  # some functions that are written in C
    return None
  kind = _convention(name, parameters)
  if kind is None:
    return None
  reserved = _TRL_GIVES if kind is Trl else VERL
  free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  named = {
    key: p
    for key, p in parameters.items()
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  }
  if wrong := [key for key in options if key in reserved]:
    raise ValueError(f"reward {name!r}: {wrong[0]!r} is no option of it")
  if wrong := [key for key in options if not (free or key in named)]:
    known = [key for key in named if key not in reserved]
    raise ValueError(
      f"reward {name!r} has no option {wrong[0]!r}: it takes {known or 'none'}"
    )
  if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
    raise ValueError(
      f"reward {name!r}: {kind.__name__.upper()}'s convention passes all by"
      " keywords, and it has parameters that take none"
    )
  takes = [key for key in named if key not in options]
  needs = [k for k in takes if named[k].default is inspect.Parameter.empty]

  bound = functools.partial(function, **options) if options else function
  needs = [key for key in needs if key not in reserved]
  return kind(bound, None if free else takes, needs)


def _convention(
  name: str, parameters: Collection[str]
) -> type[Verl] | type[Trl] | None:
  """Whose convention the names of parameters are; None for ours."""
  kinds = {"TRL's": TRL, "verl's": VERL, "grpojax's own": OURS}
  found = {
    who: named[0]
    for who, names in kinds.items()
    if (named := [key for key in parameters if key in names])
  }
  if len(found) > 1:
    said = " and ".join(f"{key!r} ({who})" for who, key in found.items())
    raise ValueError(
      f"reward {name!r} has parameters of two conventions, {said}: rename one,"
      " or wrap it in `def reward(prompt, completion, example)`"
    )
  return {"TRL's": Trl, "verl's": Verl}.get(next(iter(found), ""))


def check_columns(
  name: str, reward: Callable[..., Any], example: Mapping[str, Any], where: str
) -> None:
  """Whether the data have what a function needs.

  Args:
    name: of the function.
    reward: from `functions.resolve`; one of our convention needs nothing.
    example: one of the data set.
    where: which that is.

  Raises:
    ValueError: a column is missing; the message says which there are.
  """
  if not isinstance(reward, (Verl, Trl)):
    return
  there = reward.columns(example)
  missing = [k for k in reward.needs if k not in there and k not in _ADDED]
  if missing:
    label = name.rpartition(":")[2]
    raise ValueError(
      f"reward {name!r} needs {missing[0]!r}, and {where} has only"
      f" {', '.join(sorted(example))}: add that column, or give it one value by"
      f" reward.options.{label}.{missing[0]}=..."
    )


def wants(reward: Callable[..., Any], name: str) -> bool:
  """Whether a function is given something that costs to bring: IDS, STATE."""
  return isinstance(reward, Trl) and (
    reward.takes is None or name in reward.takes
  )
