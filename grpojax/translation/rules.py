"""Translates another library's settings by a table with a row per setting.

Most rows name the grpojax setting that takes the value. A function translates
settings that depend on each other. `trl` and `verl` have the tables; their
shared rules are at the end of this file. "Our" settings are grpojax's, "their"
settings the other library's.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.core.optim import SCHEDULES
from grpojax.runtime.terminal.trackers import TRACKERS


class Setting(NamedTuple):
  """A setting of grpojax."""

  name: str
  value: Any
  origin: str = ""  # comment: their names and values


class Note(NamedTuple):
  """A remark on a setting that differs in grpojax or is missing there."""

  origin: str  # name of their setting
  text: str
  missing: bool = False  # True if grpojax has no counterpart
  flag: str = ""  # flag required from the user, such as "model.path=MODEL"


Items = Iterator[Setting | Note]


class Translation(NamedTuple):
  """Translated configuration; the last value of a repeated setting counts."""

  library: str
  settings: tuple[Setting, ...]
  notes: tuple[Note, ...]
  unneeded: tuple[str, ...] = ()  # names without effect on training
  code: str = ""  # module with the script's functions


Text = "str | Mapping[Any, str] | Callable[[Any, Origin], str]"


class Row(NamedTuple):
  """A setting of the other library and its translation."""

  default: Any = None  # of the other library
  # Our setting, or a function that yields items, given their settings and the
  # row's name; None if another row reads the value.
  to: "str | Callable[[Origin, str], Items] | None" = None
  # Dict from their value to ours, or a function of their value and all their
  # settings. Nothing is set if the result is None.
  value: "Mapping[Any, Any] | Callable[[Any, Origin], Any] | None" = None
  # Meaning of the value in grpojax: one sentence for all non-default values,
  # a sentence per value, or a function as in `value`.
  note: Text = ""
  missing: Text = ""  # likewise, for values without a counterpart
  when: Sequence[str] = ()  # use the row only if these settings are on


class Sizes(NamedTuple):
  """Batch sizes in grpojax; a step is one generation of the other library."""

  group_size: int
  prompts: int  # per step
  updates_per_generation: int  # of the other library
  minibatches: int  # our updates per generation, which keep groups whole
  updates: int  # optimizer updates per step, over all epochs
  steps: int | None  # steps of the run; None if it depends on the data


class Library(NamedTuple):
  """Another library: its settings, and how to translate them."""

  name: str  # with version
  page: str  # page of docs/ on the translation
  table: Mapping[str, Row]  # by name of their setting
  always: Sequence[Setting | Note]  # added to every translation
  unneeded: str  # pattern of names without effect on training
  older: Mapping[str, str]  # prefixes of current names, by outdated prefix
  sizes: "Callable[[Origin], Sizes]"  # ValueError for sizes it refuses

  def newer(self, name: str) -> str:
    """Returns the current name of a setting that may be outdated."""
    for older, newer in self.older.items():
      if name.startswith(older):
        return newer + name.removeprefix(older)
    return name

  def knows(self, name: str) -> bool:
    """Returns True for names in the table and names below them (a.b for a)."""
    parts = self.newer(name).split(".")
    return any(".".join(parts[:n]) in self.table for n in range(len(parts) + 1))


class Origin(NamedTuple):
  """Settings of the other library, read from a file."""

  library: Library
  values: Mapping[str, Any]  # by name
  processes: int = 1  # number of processes of their run
  examples: int | None = None  # number of training prompts; None if unknown
  unread: Mapping[str, str] = {}  # expressions of unknown value, by name

  def __getitem__(self, name: str) -> Any:
    """Returns the value of a setting, or its default."""
    return self.values.get(name, self.library.table[name].default)

  @property
  def sizes(self) -> Sizes:
    """Sizes of batches; ValueError if the library refuses them."""
    return self.library.sizes(self)

  def sets(self, name: str) -> bool:
    """Returns True if the file changes `name` or a name below it."""
    value = self.values.get(name)
    return (bool(value) and value != self.library.table[name].default) or any(
      key.startswith(f"{name}.") for key in self.values
    )

  def comment(self, *names: str) -> str:
    """Returns "name=value" for each name, with a mark for defaults."""
    return ", ".join(
      f"{name}={self[name]!r}" + ("" if name in self.values else " (default)")
      for name in names
    )

  def setting(self, ours: str, value: Any, *names: str) -> Setting:
    """Returns our setting `ours` with a comment on their `names`."""
    return Setting(ours, value, self.comment(*names))

  def below(self, name: str, ours: str) -> Iterator[Setting]:
    """Yields all their settings below `name` as ours below `ours`."""
    for key, value in self.values.items():
      if key.startswith(f"{name}."):
        yield Setting(ours + key.removeprefix(name), value, key)


def translate(origin: Origin) -> Translation:
  """Translates settings; ValueError for values the other library refuses."""
  library = origin.library
  origin = origin._replace(values=_checked(library, origin.values))
  items = [*library.always]
  try:
    for name, row in library.table.items():
      if all(origin[flag] for flag in row.when):
        items += _apply(row, origin, name)
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    text = f"a value has a type that {library.name} refuses: {error}"
    raise ValueError(text) from error
  settings = [x for x in items if isinstance(x, Setting)]
  notes = [x for x in items if isinstance(x, Note)]
  unneeded = []
  for name in [*origin.values, *origin.unread]:
    if library.knows(name):
      if name in origin.unread:
        notes.append(_unread(origin, name, settings))
      continue
    text = f"unknown here: see {library.page}"
    if near := _intended(library, name):
      text = f"not a setting of {library.name}: did you mean {near}?"
    elif re.match(library.unneeded, name):
      unneeded.append(name)
      continue
    notes.append(Note(name, text, missing=True))
  return Translation(
    library.name, tuple(settings), tuple(notes), tuple(unneeded)
  )


def _intended(library: Library, name: str) -> str:
  """Returns the name in the table that `name` probably misspells, or ""."""
  for near in difflib.get_close_matches(name, library.table, 1, 0.9):
    section, _, last = name.rpartition(".")
    other, _, near_last = near.rpartition(".")
    # A long section makes names similar: rollout.name and rollout.n.
    alike = difflib.SequenceMatcher(None, last, near_last).ratio() > 0.8
    if (section == other and alike) or not re.match(library.unneeded, name):
      return near
  return ""


def _unread(origin: Origin, name: str, settings: list[Setting]) -> Note:
  """Returns a note on an expression whose value is unknown."""
  row = origin.library.table.get(name, Row())
  text = f"{origin.unread[name]} is not a plain value: set it (default is used)"
  if row.note and isinstance(row.note, str):
    text += f" ({row.note})"
  set_by = [x.name for x in settings if re.search(rf"\b{name}=", x.origin)]
  if isinstance(row.to, str):
    set_by = [row.to]
  flag = f"{set_by[0]}=VALUE" if set_by else ""
  return Note(name, text, missing=True, flag=flag)


def _apply(row: Row, origin: Origin, name: str) -> Items:
  """Yields the settings and notes into which a row is translated."""
  value = origin[name]
  for text, missing in ((row.note, False), (row.missing, True)):
    if isinstance(text, str):
      text = text if origin.sets(name) else ""
    else:
      text = text(value, origin) if callable(text) else text.get(value)
    if text:
      prefix = f"{value!r}: " if missing and value is not None else ""
      yield Note(name, f"{prefix}{text}", missing)
  if callable(row.to):
    yield from row.to(origin, name)
  elif row.to is not None:
    if callable(row.value):
      value = row.value(value, origin)
    elif row.value is not None:
      if value not in row.value:
        names = ", ".join(map(str, row.value))
        text = f"{value!r} has no counterpart: use one of {names}"
        yield Note(name, text, missing=True)
      value = row.value.get(value)
    if value is not None:
      yield origin.setting(row.to, value, name)


def _checked(library: Library, values: Mapping[str, Any]) -> dict[str, Any]:
  """Renames outdated settings, and drops nulls that mean the default.

  ValueError if a numeric setting is not a finite number.
  """
  is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
  checked = {}
  for name, value in {library.newer(k): x for k, x in values.items()}.items():
    default = library.table.get(name, Row()).default
    if value is None and default is not None:
      continue
    if is_number(default) and not (is_number(value) and math.isfinite(value)):
      raise ValueError(f"{name} = {value!r}: {library.name} needs a number")
    checked[name] = value
  return checked


# Values and notes for both libraries

REMAT = {True: "selective", False: "none"}
SCHEDULE = {name: name for name in SCHEDULES}
SCHEDULE |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
LOWEST_RATE = {"cosine_with_min_lr": "'cosine' is used, which ends at 0"}
NO_REPETITION_PENALTY = "no repetition penalty is available here"
SAMPLED = "the loss uses the truncated distribution too"
TOOLS = "write functions with type hints: environment.tools = ('file.py:f',)"
TURNS = (
  "see environment.tool_format, .max_turns (always limited) and"
  " .max_observation (tokens of a turn's answers); rewards see the last turn"
)
ENVIRONMENT = (
  "write environment.path = 'file.py' with step(state, action, example)"
)
OWN_ADVANTAGE = "grpojax's default, advantage = 'leave_one_out', is unbiased"
ALWAYS = (
  Setting("mesh.data", 1),
  Setting("mesh.fsdp", -1, "parameters over all devices"),
  Setting("data.template", "{prompt}", "prompts as they are"),
)
LORA_TARGETS = tuple("q k v o gate up down".split())
PART = 16  # completions per micro-batch, as in configs/own_model.py
MAX_COMPLETIONS = 2**20  # per update; published runs have thousands

# Conversions of values

none_for_0 = lambda value, _: value or None
filter_size = lambda value, _: max(value or 0, 0)  # top-k: off for null and -1
max_grad_norm = lambda value, _: value or 1e9  # 0 means unbounded
as_list = lambda value: [value] if isinstance(value, str) else list(value or ())


def micro_batches(at_least: int, origin: Origin) -> int:
  """Returns an update's number of micro-batches; results do not depend on it.

  It is at least `at_least`, unless micro-batches would then have fewer than
  `PART` completions, which is slow. ValueError if the update has more than
  MAX_COMPLETIONS completions.
  """
  sizes = origin.sizes
  prompts = sizes.prompts // sizes.minibatches
  samples = prompts * sizes.group_size
  if samples > MAX_COMPLETIONS:
    text = f"an update of {prompts} prompts x {sizes.group_size} completions"
    raise ValueError(f"{text} is over {MAX_COMPLETIONS}: check the sizes")
  at_least = min(at_least, math.ceil(samples / PART))
  counts = range(max(at_least, 1), samples)
  return next((n for n in counts if samples % n == 0), samples)


# Rules for several settings


def steps(origin: Origin, name: str, epochs: str, limited: bool) -> Items:
  """Translates the number of steps: from `name` if `limited`, else `epochs`."""
  count = origin.sizes.steps
  yield origin.setting("steps", count or 100, name if limited else epochs)
  if count is None:
    text = f"steps depend on the data: set --examples=N, or {name}"
    yield Note(epochs, text, missing=True, flag="steps=N")


def stop_strings(origin: Origin, name: str) -> Items:
  """Translates stop strings."""
  if strings := tuple(map(str, as_list(origin[name]))):
    yield origin.setting("sampling.stop", strings, name)
    text = f"rewards see the stop string in {origin.library.name}, but not here"
    yield Note(name, text)


def trackers(origin: Origin, name: str) -> Items:
  """Translates trackers of metrics."""
  names = as_list(origin[name])
  known = tuple(tracker for tracker in names if tracker in TRACKERS)
  yield origin.setting("log.trackers", known, name)
  for tracker in dict.fromkeys(names):
    if tracker not in (*TRACKERS, "all", "none", "console"):
      text = "write a function: --config.log.trackers=file.py:function"
      yield Note(name, f"{tracker!r}: {text} (docs/run-directory.md)")


def optimizer(origin: Origin, name: str) -> Items:
  """Translates the optimizer to AdamW or Adafactor."""
  kind = str(origin[name] or "").lower()
  if "adafactor" in kind:
    yield origin.setting("optim.name", "adafactor", name)
  elif not kind.startswith("adam"):
    text = f"{origin[name]!r}: AdamW is used; adafactor is available too"
    yield Note(name, text, missing=True)


def model(origin: Origin, name: str) -> Items:
  """Translates the directory or name of the model."""
  if origin[name]:
    yield origin.setting("model.path", str(origin[name]), name)
  else:  # an invalid name, so the default model is not trained
    yield Setting("model.path", "give --config.model.path=MODEL")
    yield Note(name, "not in the file", missing=True, flag="model.path=MODEL")


def run_name(origin: Origin, name: str) -> Items:
  """Translates the run's name, by default the last part of `output_dir`."""
  text = str(origin[name] or origin.values.get("output_dir") or "translated")
  text = text.rstrip("/").rpartition("/")[2]
  text = re.sub(r"[^\w.-]+", "-", text).strip("-.")
  comment = origin.comment(name) if origin[name] else ""
  yield Setting("name", text or "translated", comment)


def lora_targets(origin: Origin, name: str) -> Items:
  """Translates the names of matrices with adapters."""
  names = origin[name]
  if names in (None, "all-linear"):
    return
  names = as_list(names)
  known = [n for n in LORA_TARGETS if f"{n}_proj" in names]
  if known:
    yield origin.setting("lora.targets", f"layers/({'|'.join(known)})", name)
  if len(known) < len(names):
    text = f"{names}: only {', '.join(LORA_TARGETS)} (_proj) can have adapters"
    yield Note(name, text, missing=True)


def data(origin: Origin, name: str) -> Items:
  """Translates the name or path of the data set."""
  path = yield from first_file(name, origin[name] or "FILE.jsonl")
  if not origin[name]:
    flag = "data.path=FILE.jsonl"
    yield Note(name, "not in the file", missing=True, flag=flag)
  if path.lower() in ("gsm8k", "openai/gsm8k"):
    yield origin.setting("data.name", "gsm8k", name)
    return
  is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)
  kind = "jsonl"
  if path.endswith(".parquet"):
    kind = "parquet"
  elif is_hub_name and not path.endswith((".jsonl", ".json", ".csv")):
    kind = "huggingface"
  yield Setting("data.name", kind)
  yield origin.setting("data.path", path, name)
  text = "set its columns by data.options.prompt and .answer ('' for none),"
  yield Note(name, f"{text} and a held-out share by data.options.test")


def first_file(name: str, files: Any) -> Iterator[Note]:
  """Returns the first of several files, and yields a note on the rest."""
  first, *omitted = map(str, as_list(files))
  if omitted:
    text = f"only {first!r} is read; use a pattern to add"
    text = f"{text} {', '.join(map(repr, omitted))}"
    yield Note(name, text, missing=True)
  return first


def template_options(origin: Origin, name: str) -> Items:
  """Translates keywords of the chat template, which may be JSON."""
  if isinstance(origin[name], str):
    try:
      items = json.loads(origin[name]).items()
    except ValueError as error:
      raise ValueError(f"{name} = {origin[name]!r} is not JSON") from error
    origin = origin._replace(values={f"{name}.{k}": v for k, v in items})
  yield from origin.below(name, "data.template_options")
