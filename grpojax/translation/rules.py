"""Translation by a table with a row for each setting of another library.

Most rows name the setting of ours that takes the value; a function yields
settings and notes if ours depends on several of theirs. The tables are in `trl`
and `verl`, the rules that both need at the end of this file.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.core.optim import SCHEDULES
from grpojax.runtime.terminal.trackers import TRACKERS


class Setting(NamedTuple):
  """Setting of ours, with a comment on names and values of theirs."""

  name: str
  value: Any
  theirs: str = ""


class Note(NamedTuple):
  """Sentence on what a setting of theirs means here, or that it is missing."""

  theirs: str
  text: str
  missing: bool = False
  flag: str = ""  # "model.path=MODEL", which the user has to give


Items = Iterator[Setting | Note]


class Translation(NamedTuple):
  """Configuration of a library; the later of two settings of a name counts."""

  library: str
  settings: tuple[Setting, ...]
  notes: tuple[Note, ...]
  unneeded: tuple[str, ...] = ()  # names that change nothing in the run
  code: str = ""  # a module with the script's functions


Text = "str | Mapping[Any, str] | Callable[[Any, Theirs], str]"


class Row(NamedTuple):
  """A setting of theirs and its translation.

  Attributes:
    default: Value in their library if a file does not set it.
    to: Setting of ours that takes the value, or a function of their settings
      and this name that yields items; None if another row reads it.
    value: Our value for each of theirs, or a function of theirs and of all
      their settings. None as a result sets nothing.
    note: Meaning of the file's value here: one sentence for all values but the
      default, one for each value, or a function as in `value`.
    missing: Likewise, for a value without a counterpart here.
    when: Their settings that have to be on, for the row to count.
  """

  default: Any = None
  to: "str | Callable[[Theirs, str], Items] | None" = None
  value: "Mapping[Any, Any] | Callable[[Any, Theirs], Any] | None" = None
  note: Text = ""
  missing: Text = ""
  when: Sequence[str] = ()


class Sizes(NamedTuple):
  """Sizes of batches here, where a step is one generation."""

  group_size: int
  prompts: int  # per step
  cuts: int  # updates that the library cuts a generation into
  minibatches: int  # the same here, where groups stay whole
  updates: int  # optimizer updates per step, over all epochs
  steps: int | None  # of the run; None if it depends on the data


class Library(NamedTuple):
  """Another library."""

  name: str  # with its version
  page: str  # of our documentation about it
  table: Mapping[str, Row]  # by their names
  always: Sequence[Setting | Note]  # of every file
  unneeded: str  # pattern of names that do not change what is learned
  older: Mapping[str, str]  # beginnings of newer names, by those of older ones
  sizes: "Callable[[Theirs], Sizes]"  # ValueError if the library refuses them

  def newer(self, name: str) -> str:
    """Returns the name in the version of the table."""
    for older, newer in self.older.items():
      if name.startswith(older):
        return newer + name.removeprefix(older)
    return name

  def knows(self, name: str) -> bool:
    """Returns True for a name of the table, and for all names below one."""
    parts = self.newer(name).split(".")
    return any(".".join(parts[:n]) in self.table for n in range(len(parts) + 1))


class Theirs(NamedTuple):
  """Settings of theirs, as a file has them."""

  library: Library
  values: Mapping[str, Any]  # by name
  processes: int = 1  # that the library was started with
  examples: int | None = None  # of training; None if unknown
  unread: Mapping[str, str] = {}  # expressions by name

  def __getitem__(self, name: str) -> Any:
    """Returns the file's value of a setting, else the library's default."""
    return self.values.get(name, self.library.table[name].default)

  @property
  def sizes(self) -> Sizes:
    """Sizes of batches; ValueError if the library refuses them."""
    return self.library.sizes(self)

  def sets(self, name: str) -> bool:
    """Returns True if the file changes `name`, or sets names below it."""
    value = self.values.get(name)
    return (bool(value) and value != self.library.table[name].default) or any(
      key.startswith(f"{name}.") for key in self.values
    )

  def comment(self, *names: str) -> str:
    """Returns "name=value" for each name, with a mark at defaults."""
    return ", ".join(
      f"{name}={self[name]!r}" + ("" if name in self.values else " (default)")
      for name in names
    )

  def setting(self, ours: str, value: Any, *names: str) -> Setting:
    """Returns a setting of ours that comes from theirs of these names."""
    return Setting(ours, value, self.comment(*names))

  def below(self, name: str, ours: str) -> Iterator[Setting]:
    """Yields all settings of theirs below a name, as ours below another."""
    for key, value in self.values.items():
      if key.startswith(f"{name}."):
        yield Setting(ours + key.removeprefix(name), value, key)


def translate(theirs: Theirs) -> Translation:
  """Translates a file's values; ValueError for any that the library refuses."""
  library = theirs.library
  theirs = theirs._replace(values=_checked(library, theirs.values))
  items = [*library.always]
  try:
    for name, row in library.table.items():
      if all(theirs[flag] for flag in row.when):
        items += _apply(row, theirs, name)
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    text = f"a value is of no kind that {library.name} takes: {error}"
    raise ValueError(text) from error
  settings = [x for x in items if isinstance(x, Setting)]
  notes = [x for x in items if isinstance(x, Note)]
  unneeded = []
  for name in [*theirs.values, *theirs.unread]:
    if library.knows(name):
      if name in theirs.unread:
        notes.append(_unread(theirs, name, settings))
      continue
    text = f"unknown here; it may change the run ({library.page})"
    if near := difflib.get_close_matches(name, library.table, 1, 0.9):
      text = f"no setting of {library.name}: did you mean {near[0]}?"
    elif re.match(library.unneeded, name):
      unneeded.append(name)
      continue
    notes.append(Note(name, text, missing=True))
  return Translation(
    library.name, tuple(settings), tuple(notes), tuple(unneeded)
  )


def _unread(theirs: Theirs, name: str, settings: list[Setting]) -> Note:
  """Returns a note on a value that is unknown unless the script runs."""
  row = theirs.library.table.get(name, Row())
  text = f"{theirs.unread[name]} is no plain value: set it (now the default)"
  if row.note and isinstance(row.note, str):
    text += f" ({row.note})"
  set_by = [x.name for x in settings if re.search(rf"\b{name}=", x.theirs)]
  if isinstance(row.to, str):
    set_by = [row.to]
  flag = f"{set_by[0]}=VALUE" if set_by else ""
  return Note(name, text, missing=True, flag=flag)


def _apply(row: Row, theirs: Theirs, name: str) -> Items:
  value = theirs[name]
  for text, missing in ((row.note, False), (row.missing, True)):
    if isinstance(text, str):
      text = text if theirs.sets(name) else ""
    else:
      text = text(value, theirs) if callable(text) else text.get(value)
    if text:
      prefix = f"{value!r}: " if missing and value is not None else ""
      yield Note(name, f"{prefix}{text}", missing)
  if callable(row.to):
    yield from row.to(theirs, name)
  elif row.to is not None:
    if callable(row.value):
      value = row.value(value, theirs)
    elif row.value is not None:
      if value not in row.value:
        names = ", ".join(map(str, row.value))
        text = f"{value!r} has no counterpart; there are {names}"
        yield Note(name, text, missing=True)
      value = row.value.get(value)
    if value is not None:
      yield theirs.setting(row.to, value, name)


def _checked(library: Library, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns values by newer names, without nulls that stand for defaults.

  ValueError unless each value that has to be a number is a finite one.
  """
  is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
  checked = {}
  for name, value in {library.newer(k): x for k, x in values.items()}.items():
    default = library.table.get(name, Row()).default
    if value is None and default is not None:
      continue
    if is_number(default) and not (is_number(value) and math.isfinite(value)):
      raise ValueError(f"{name} = {value!r}: {library.name} takes a number")
    checked[name] = value
  return checked


# Values and notes of both libraries.

REMAT = {True: "selective", False: "none"}
SCHEDULE = {name: name for name in SCHEDULES}
SCHEDULE |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
LOWEST_RATE = {"cosine_with_min_lr": "'cosine' is taken, which ends at 0"}
NO_REPETITION_PENALTY = "no repetition penalty is available here"
SAMPLED = "the loss is of the distribution that was sampled from"
TOOLS = "write functions with type hints: environment.tools = ('file.py:f',)"
TURNS = (
  "see environment.tool_format, .max_turns (always a limit) and"
  " .max_observation (tokens of answers); rewards see the last turn's text"
)
ENVIRONMENT = (
  "write environment.path = 'file.py' with step(state, action, example)"
)
OWN_ADVANTAGE = "unbiased, and grpojax's default: advantage = 'leave_one_out'"
ALWAYS = (
  Setting("mesh.data", 1),
  Setting("mesh.fsdp", -1, "parameters over all devices"),
  Setting("data.template", "{prompt}", "prompts as they are"),
)
LORA_TARGETS = tuple("q k v o gate up down".split())
PART = 16
"""Completions of a micro-batch in configs/own_model.py."""
MAX_COMPLETIONS = 2**20  # of an update; published runs have thousands

# Conversions of one value.

none_for_0 = lambda value, _: value or None
filter_size = lambda value, _: max(value or 0, 0)  # top-k: off at null and -1
max_grad_norm = lambda value, _: value or 1e9  # 0 is no bound


def micro_batches(theirs: Theirs, at_least: int) -> int:
  """Returns the number of equal parts of an update, which changes no result.

  Small parts waste time, so parts have at least `PART` completions even if the
  other library has `at_least` parts. ValueError for more than MAX_COMPLETIONS,
  which nobody means: trying takes hours.
  """
  sizes = theirs.sizes
  prompts = sizes.prompts // sizes.minibatches
  samples = prompts * sizes.group_size
  if samples > MAX_COMPLETIONS:
    text = f"an update of {prompts} prompts x {sizes.group_size} completions"
    raise ValueError(f"{text} is over {MAX_COMPLETIONS}: check the sizes")
  at_least = min(at_least, math.ceil(samples / PART))
  counts = range(max(at_least, 1), samples)
  return next((n for n in counts if samples % n == 0), samples)


# Rules of several settings.


def steps(theirs: Theirs, name: str, epochs: str, limited: bool) -> Items:
  """Steps, by their limit `name` or, unless `limited`, by their epochs."""
  count = theirs.sizes.steps
  yield theirs.setting("steps", count or 100, name if limited else epochs)
  if count is None:
    text = f"steps depend on the data: give --examples=N, or {name}"
    yield Note(epochs, text, missing=True, flag="steps=N")


def one_of(theirs: Theirs, name: str, choices: Collection[str]) -> Any:
  """Returns a value; ValueError if it is not one of these."""
  if theirs[name] not in choices:
    known = ", ".join(choices)
    raise ValueError(f"{name} = {theirs[name]!r}: use one of {known}")
  return theirs[name]


def stop_strings(theirs: Theirs, name: str) -> Items:
  """Strings that end a completion: one, or a list."""
  value = theirs[name] or ()
  strings = [value] if isinstance(value, str) else map(str, value)
  if strings := tuple(strings):
    yield theirs.setting("sampling.stop", strings, name)
    text = f"rewards of {theirs.library.name} also see the string, not here"
    yield Note(name, text)


def trackers(theirs: Theirs, name: str) -> Items:
  """Places for metrics besides the run directory."""
  value = theirs[name]
  names = [value] if isinstance(value, str) else list(value or ())
  known = tuple(tracker for tracker in names if tracker in TRACKERS)
  yield theirs.setting("log.trackers", known, name)
  for other in dict.fromkeys(names):
    if other in (*TRACKERS, "all", "none", "console"):
      continue
    text = "write a function: --config.log.trackers=file.py:function"
    yield Note(name, f"{other!r}: {text} (docs/run-directory.md)")


def optimizer(theirs: Theirs, name: str) -> Items:
  """AdamW or Adafactor."""
  kind = str(theirs[name] or "").lower()
  if "adafactor" in kind:
    yield theirs.setting("optim.name", "adafactor", name)
  elif not kind.startswith("adam"):
    text = f"{theirs[name]!r}: AdamW is taken; adafactor is there too"
    yield Note(name, text, missing=True)


def model(theirs: Theirs, name: str) -> Items:
  """The model's directory or name."""
  if theirs[name]:
    yield theirs.setting("model.path", str(theirs[name]), name)
  else:  # a name of no model, so that no other one is trained in its place
    yield Setting("model.path", "give --config.model.path=MODEL")
    yield Note(name, "not in the file", missing=True, flag="model.path=MODEL")


def run_name(theirs: Theirs, name: str) -> Items:
  """The run's name: theirs, or the end of their directory."""
  text = str(theirs[name] or theirs.values.get("output_dir") or "translated")
  text = text.rstrip("/").rpartition("/")[2]
  text = re.sub(r"[^\w.-]+", "-", text).strip("-.")
  comment = theirs.comment(name) if theirs[name] else ""
  yield Setting("name", text or "translated", comment)


def lora_targets(theirs: Theirs, name: str) -> Items:
  """Matrices that have adapters: all of them, or some."""
  names = theirs[name]
  if names in (None, "all-linear"):
    return
  names = [names] if isinstance(names, str) else list(names)
  known = [n for n in LORA_TARGETS if f"{n}_proj" in names]
  if known:
    yield theirs.setting("lora.targets", f"layers/({'|'.join(known)})", name)
  if len(known) < len(names):
    text = f"{names}: adapters are of {', '.join(LORA_TARGETS)} (_proj)"
    yield Note(name, text, missing=True)


def data(theirs: Theirs, name: str) -> Items:
  """The data set, by name or path."""
  path = yield from first_file(name, theirs[name] or "FILE.jsonl")
  if not theirs[name]:
    text = "not in the file: give your data"
    yield Note(name, text, missing=True, flag="data.path=FILE.jsonl")
  if path.lower() in ("gsm8k", "openai/gsm8k"):
    yield theirs.setting("data.name", "gsm8k", name)
    return
  of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)
  kind = "jsonl"
  if path.endswith(".parquet"):
    kind = "parquet"
  elif of_hub and not path.endswith((".jsonl", ".json", ".csv")):
    kind = "huggingface"
  yield Setting("data.name", kind)
  yield theirs.setting("data.path", path, name)
  text = "data.options.prompt and .answer name its columns ('' for none);"
  yield Note(name, f"{text} data.options.test holds out a share of it")


def first_file(name: str, files: Any) -> Iterator[Note]:
  """Returns the first of one or more files, and yields a note on the others."""
  first, *others = [files] if isinstance(files, str) else map(str, files)
  if others:
    rest = ", ".join(map(repr, others))
    text = f"{first!r} is taken, and left out: {rest}; a pattern takes all"
    yield Note(name, text, missing=True)
  return first


def template_options(theirs: Theirs, name: str) -> Items:
  """Keywords of the chat template: all names below this one, or JSON."""
  if isinstance(theirs[name], str):
    try:
      items = json.loads(theirs[name]).items()
    except ValueError as error:
      raise ValueError(f"{name} = {theirs[name]!r} is no JSON") from error
    theirs = theirs._replace(values={f"{name}.{k}": v for k, v in items})
  yield from theirs.below(name, "data.template_options")
