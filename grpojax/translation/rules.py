"""Translation by a table: a rule for each setting of another library.

A library is a table {their name: Rule}. Most rules name the setting of ours
that takes the value; where one depends on several, a function of all of their
settings yields what is to be set and said. `trl` and `verl` are such tables;
the functions that both have need of stand below.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from grpojax.core.optim import SCHEDULES
from grpojax.core.packing import micro_batches as micro_batches_lib
from grpojax.runtime.terminal.trackers import TRACKERS


class Setting(NamedTuple):
  """Setting of ours.

  Attributes:
    name: Dotted path.
    value: Value.
    theirs: Names and values of theirs that it comes from, for a comment.
  """

  name: str
  value: Any
  theirs: str = ""


class Differs(NamedTuple):
  """Setting of theirs that means something else here, and a sentence."""

  theirs: str
  text: str


class Missing(NamedTuple):
  """Setting of theirs without a counterpart, and a sentence."""

  theirs: str
  text: str


Items = Iterator[Setting | Differs | Missing]


class Translation(NamedTuple):
  """Configuration of theirs as settings of ours.

  Attributes:
    library: Name and version of the other library.
    settings: Settings of ours; of two of one name the later one counts.
    differs: Settings of theirs that mean something else here.
    missing: Settings of theirs without a counterpart, and why.
  """

  library: str
  settings: tuple[Setting, ...]
  differs: tuple[Differs, ...]
  missing: tuple[Missing, ...]


class Rule(NamedTuple):
  """Treatment of one setting of theirs.

  Attributes:
    default: Value that holds in their library where a file says nothing.
    to: Name of the setting of ours that takes the value; or a function of all
      of their settings and this one's name that yields items; or None, where
      the rule of another setting reads this one.
    value: With a name, our value for each of theirs, or a function of the same
      arguments that makes it. None as a value sets nothing.
    differs: Sentence about what a value of the file's means here.
  """

  default: Any = None
  to: "str | Callable[[Theirs, str], Items] | None" = None
  value: "Mapping[Any, Any] | Callable[[Theirs, str], Any] | None" = None
  differs: str = ""


class Library(NamedTuple):
  """Another library.

  Attributes:
    name: Name and version.
    table: Rules by their names.
    ignored: Reasons why nothing is translated, and patterns of names, with
      spaces between, for each ("*" is any text); the first that fits counts,
      and "" is not worth a word.
    nullable: Names of numbers that may be null.
  """

  name: str
  table: Mapping[str, Rule]
  ignored: Mapping[str, str]
  nullable: tuple[str, ...] = ()

  def reason(self, name: str) -> str | None:
    """The reason why a name is ignored; None where no pattern fits."""
    for reason, patterns in self.ignored.items():
      if any(fnmatch.fnmatchcase(name, one) for one in patterns.split()):
        return reason
    return None

  def knows(self, name: str) -> bool:
    """True for a name of the library's."""
    return name in self.table or self.reason(name) is not None


class Theirs(NamedTuple):
  """Settings of theirs, as a file has them.

  Attributes:
    library: Library that the file was written for.
    values: Values that the file has, by name.
    processes: Number of processes that the library was started with.
    examples: Number of training examples; None where it is not known.
  """

  library: Library
  values: Mapping[str, Any]
  processes: int = 1
  examples: int | None = None

  def __getitem__(self, name: str) -> Any:
    """The value of a setting: the file's, else the library's default."""
    return self.values.get(name, self.library.table[name].default)

  def comment(self, *names: str) -> str:
    """Settings as text: "name=value", marked where it is a default."""
    return ", ".join(
      f"{name}={self[name]!r}" + ("" if name in self.values else " (default)")
      for name in names
    )

  def setting(self, ours: str, value: Any, *names: str) -> Setting:
    """A setting of ours that comes from theirs of these names."""
    return Setting(ours, value, self.comment(*names))


def translate(
  library: Library,
  values: Mapping[str, Any],
  processes: int = 1,
  examples: int | None = None,
) -> Translation:
  """Translates the settings of a file by the library's table.

  Args:
    library: Library that the file was written for.
    values: Values of the file, by name.
    processes: Number of processes that the library was started with.
    examples: Number of training examples, where epochs are to be counted.

  Raises:
    ValueError: a value that the library refuses, or of a wrong kind.
  """
  theirs = Theirs(library, _checked(library, values), processes, examples)
  items: list[Setting | Differs | Missing] = []
  try:
    for name, rule in library.table.items():
      items += _apply(rule, theirs, name)
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    raise ValueError(
      f"a value is of no kind that {library.name} takes ({error}): a list or 0"
      " where there is a name or a size, or the like"
    ) from error
  for name in theirs.values:
    reason = library.reason(name)
    if name not in library.table and reason != "":
      items.append(Missing(name, reason or "not known here"))
  return Translation(
    library.name,
    *(
      tuple(item for item in items if isinstance(item, kind))
      for kind in (Setting, Differs, Missing)
    ),
  )


def _apply(rule: Rule, theirs: Theirs, name: str) -> Items:
  value = theirs[name]
  if rule.differs and value and name in theirs.values:
    yield Differs(name, rule.differs)
  if callable(rule.to):
    yield from rule.to(theirs, name)
  elif rule.to is not None:
    if callable(rule.value):
      value = rule.value(theirs, name)
    elif rule.value is not None and value in rule.value:
      value = rule.value[value]
    elif rule.value is not None:
      names = ", ".join(map(str, rule.value))
      yield Missing(name, f"{value!r} has no counterpart; there are {names}")
      return
    if value is not None:
      yield theirs.setting(rule.to, value, name)


def _checked(library: Library, values: Mapping[str, Any]) -> dict[str, Any]:
  """The values, without the nulls that stand for defaults.

  Raises:
    ValueError: no number where one is needed, or an infinite one.
  """
  checked = {}
  for name, value in values.items():
    default = library.table.get(name, Rule()).default
    if value is None:
      if default is not None and name not in library.nullable:
        continue
    elif _is_number(default) and not (
      _is_number(value) and math.isfinite(value)
    ):
      raise ValueError(f"{name} = {value!r}: {library.name} has a number there")
    checked[name] = value
  return checked


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


# What both libraries have alike: values, and then items.

REMAT = {True: "full", False: "none"}


def none_for_0(theirs: Theirs, name: str) -> Any:
  """The value, or None where it is 0 or empty, and nothing is to be set."""
  return theirs[name] or None


def max_grad_norm(theirs: Theirs, name: str) -> float:
  """A bound of the gradient's norm; with 0 one that is never reached."""
  return theirs[name] or 1e9


def optimizer(theirs: Theirs, name: str) -> Items:
  """AdamW or Adafactor."""
  kind = str(theirs[name] or "").lower()
  if "adafactor" in kind:
    yield theirs.setting("optim.name", "adafactor", name)
  elif not kind.startswith("adam"):
    yield Missing(
      name, f"{theirs[name]!r}: AdamW is taken; adafactor is there too"
    )
  elif "8bit" in kind or "paged" in kind:
    yield Differs(
      name, "moments are float32, or optim.moments_dtype = 'bfloat16'"
    )


def schedule(theirs: Theirs, name: str) -> Items:
  """The course of the learning rate."""
  ours = str(theirs[name] or "constant").removesuffix("_with_warmup")
  if ours not in SCHEDULES:
    yield Missing(
      name,
      f"{theirs[name]!r}: there are {', '.join(SCHEDULES)}; constant is taken",
    )
    ours = "constant"
  yield theirs.setting("optim.schedule", ours, name)


def sampling_filter(theirs: Theirs, name: str) -> Items:
  """Top-k and the like, which are off at none, 0, -1 or 1."""
  value = max(theirs[name] or 0, 0)
  yield theirs.setting(f"sampling.{name.rpartition('.')[2]}", value, name)
  if value not in (0, 1):
    yield Differs(
      name,
      "the loss is of the distribution that was sampled from;"
      f" {theirs.library.name} scores the policy without it",
    )


def unknown_steps(name: str, remedy: str) -> Missing:
  """A note that epochs cannot be counted."""
  return Missing(
    name,
    "epochs are steps here, and how many is not known without the data: give"
    f" --examples=N, or {remedy}",
  )


def own_advantage(name: str) -> Differs:
  """A note that the default is another advantage."""
  return Differs(
    name,
    "grpojax's own default is advantage = 'leave_one_out', the unbiased"
    " gradient",
  )


def model(theirs: Theirs, name: str) -> Items:
  """The model's directory or name, and what suits large ones."""
  yield Setting("mesh.data", 1)
  yield Setting("mesh.fsdp", -1, "parameters over all devices")
  yield Setting("sampling.compact", False, "fewer sizes to compile")
  if theirs[name]:
    yield theirs.setting("model.path", str(theirs[name]), name)
  else:
    yield Missing(name, "not in the file: give --config.model.path")


def run_name(theirs: Theirs, name: str) -> Items:
  """The run's name: theirs, or the end of their directory."""
  text = str(theirs[name] or theirs.values.get("output_dir") or "translated")
  text = text.rstrip("/").rpartition("/")[2]
  text = re.sub(r"[^\w.-]+", "-", text).strip("-.")
  comment = theirs.comment(name) if theirs[name] else ""
  yield Setting("name", text or "translated", comment)


LORA_TARGETS = {f"{name}_proj": name for name in ("q", "k", "v", "o")}
LORA_TARGETS |= {f"{name}_proj": name for name in ("gate", "up", "down")}


def lora(theirs: Theirs, rank: str, alpha: str, targets: str) -> Items:
  """Low-rank adapters; of what `targets` names, or of all matrices."""
  yield theirs.setting("lora.rank", theirs[rank], rank)
  yield theirs.setting("lora.alpha", theirs[alpha], alpha)
  names = theirs[targets]
  if names in (None, "all-linear"):
    return
  names = [names] if isinstance(names, str) else list(names)
  known = [LORA_TARGETS[name] for name in names if name in LORA_TARGETS]
  if known:
    pattern = f"layers/({'|'.join(known)})"
    yield theirs.setting("lora.targets", pattern, targets)
  for name in names:
    if name not in LORA_TARGETS:
      yield Missing(
        targets, f"{name!r}: adapters are of {', '.join(LORA_TARGETS)}"
      )


def is_gsm8k(path: Any) -> bool:
  """True for a path that stands for GSM8K of the Hub."""
  return str(path).lower() in ("gsm8k", "openai/gsm8k")


def data(theirs: Theirs, name: str) -> Items:
  """The data set, by name or path."""
  yield Setting("data.template", "{prompt}", "prompts as they are")
  if not theirs[name]:
    yield Setting("data.name", "jsonl")
    yield Setting("data.path", "data")
    yield Missing(
      name, "not in the file: data.path = 'data' stands in its place"
    )
    return
  paths = theirs[name]
  path, *others = [paths] if isinstance(paths, str) else map(str, paths)
  for other in others:
    yield Missing(
      name, f"{other!r}: data.mixture takes several data sets, or a pattern"
    )
  if is_gsm8k(path):
    yield theirs.setting("data.name", "gsm8k", name)
    return
  of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)
  if path.endswith(".parquet"):
    kind = "parquet"
  elif of_hub and not path.endswith((".jsonl", ".json", ".csv")):
    kind = "huggingface"
  else:
    kind = "jsonl"
  yield Setting("data.name", kind)
  yield theirs.setting("data.path", path, name)
  yield Differs(
    name,
    "examples have a prompt and an answer: data.options.prompt and .answer name"
    " their columns ('' for none); data.options.test holds a share out where"
    " there is no test split",
  )


def template_options(theirs: Theirs, name: str) -> Items:
  """Keywords of the chat template: all names below this one."""
  for key, value in theirs.values.items():
    if key.startswith(f"{name}."):
      option = key.removeprefix(f"{name}.")
      yield Setting(f"data.template_options.{option}", value, name)


def trackers(theirs: Theirs, name: str) -> Items:
  """Places for metrics besides the run directory."""
  value = theirs[name]
  names = [value] if isinstance(value, str) else list(value or ())
  known = tuple(tracker for tracker in names if tracker in TRACKERS)
  yield theirs.setting("log.trackers", known, name)
  for other in sorted({*names} - {*TRACKERS, "console", "none", "all"}):
    yield Missing(
      name, f"{other!r}: the trackers here are {', '.join(TRACKERS)}"
    )


MAX_COMPLETIONS = 2**20  # of an update; published runs have thousands


def micro_batches(prompts: int, group_size: int, at_least: int) -> int:
  """The smallest possible number of micro-batches from `at_least` on.

  Raises:
    ValueError: so many completions that nobody means it: trying takes hours.
  """
  if prompts * group_size > MAX_COMPLETIONS:
    raise ValueError(
      f"an update of {prompts} prompts x {group_size} completions is over "
      f"{MAX_COMPLETIONS}: check the sizes of batches"
    )
  for count in range(max(at_least, 1), prompts * group_size):
    try:
      micro_batches_lib.cuts(prompts, group_size, count)
      return count
    except ValueError:
      continue
  return prompts * group_size
