"""Configurations as such: keys and types, JSON, differences.

Nothing here knows what a config is for; each program has its own default (see
`grpojax.training.config`).
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
from ml_collections import ConfigDict

FREE = ("options", "template_options", "mixture")
"""Names of sections that take any key: keyword arguments of what the config
names elsewhere, and things that a user names. They are checked where they are
used."""


def sections(config: ConfigDict, prefix: str = "") -> list[str]:
  """The dotted names of a config's sections, and of theirs."""
  names = []
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      names += [f"{prefix}{key}", *sections(value, f"{prefix}{key}.")]
  return names


def free_sections(config: ConfigDict, prefix: str = "") -> list[str]:
  """Those of its sections that take any key; see `FREE`."""
  names = sections(config, prefix)
  return [name for name in names if name.rpartition(".")[2] in FREE]


def is_free(name: str, free: Sequence[str]) -> bool:
  """Returns True for a dotted name below one of the free sections."""
  return name.startswith(tuple(f"{section}." for section in free))


def flatten(config: ConfigDict) -> dict[str, Any]:
  """Leaves by dotted path: `{"optim.learning_rate": 1e-4, ...}`."""
  return flax.traverse_util.flatten_dict(config.to_dict(), sep=".")


def nearest(name: str, candidates: Sequence[str]) -> str | None:
  """The candidate most like `name`, by last path element or as a whole.

  An element's initials are like it: lr and learning_rate.

  Args:
    name: a dotted name that is none of the candidates.
    candidates: dotted names.

  Returns:
    A candidate, or None where nothing is similar.
  """

  def likeness(a, b):
    return difflib.SequenceMatcher(None, a, b).ratio()

  def score(candidate):
    typed, element = name.split(".")[-1], candidate.split(".")[-1]
    initials = "".join(word[:1] for word in element.split("_"))
    short = len(typed) > 1 and typed == initials
    last = 0.9 if short else likeness(typed, element)
    whole = likeness(name, candidate)
    return max(last, whole), whole

  best = max(candidates, key=score, default=None)
  return best if best is not None and score(best)[0] >= 0.6 else None


def check_keys(
  config: ConfigDict,
  default: ConfigDict,
  words: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
  """Keys that are unknown or missing, and values of a wrong type, a line each.

  Args:
    config: the config to check.
    default: has all the keys, and a value of the right type for each.
    words: for some keys, texts that may stand in the place of a number.
  """
  allowed, flat_config, config_errors = flatten(default), flatten(config), []
  free, needed = free_sections(default), sections(default)
  for name, value in flat_config.items():
    if name in needed:
      config_errors.append(
        config_error(name, value, "is a section, with keys of its own")
      )
    elif name not in allowed and not is_free(name, free):
      guess = nearest(name, list(allowed))
      hint = f"; did you mean --config.{guess}?" if guess else ""
      config_errors.append(config_error(name, value, f"unknown key{hint}"))
  present = sections(config)
  for name in free:
    if name not in present and name not in flat_config:
      config_errors.append(
        f"--config.{name}: missing; start from default_config()"
      )
  for name, value in allowed.items():
    if is_free(name, free):
      continue
    if name not in flat_config:
      config_errors.append(
        f"--config.{name}: missing; start from default_config()"
      )
    elif flat_config[name] in (words or {}).get(name, ()):
      continue
    elif not _same_type(value, flat_config[name]):
      kind = type(value).__name__
      config_errors.append(
        config_error(name, flat_config[name], f"must be of type {kind}")
      )
  return config_errors


def config_error(field: str, value: Any, remedy: str) -> str:
  """A line about a setting that cannot be: field, value, what to do."""
  return f"--config.{field} = {value!r}: {remedy}"


def below(section: str, text: str) -> str:
  """An error about a config that is a section of another one: all names."""
  return text.replace("--config.", f"--config.{section}.")


def name_errors(name: str) -> list[str]:
  """Returns a line where a config's name cannot name a directory."""
  if re.fullmatch(r"[\w.-]*[\w-][\w.-]*", name):
    return []
  remedy = "names a directory: use letters, digits, '_', '-' and '.'"
  return [config_error("name", name, remedy)]


def refuse(config_errors: Sequence[str]) -> None:
  """Raises ValueError with all errors, a line each, if there are any."""
  if config_errors:
    raise ValueError("\n  ".join(["the config is not valid:", *config_errors]))


def _same_type(expected: Any, value: Any) -> bool:
  if isinstance(expected, float):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
  return type(value) is type(expected)


def to_json(config: ConfigDict) -> str:
  """The config as JSON text with sorted keys."""
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
  """The config that `to_json` wrote, locked; JSON lists become tuples.

  Raises:
    ValueError: the text is no JSON object.
  """

  def restore(value):
    if isinstance(value, dict):
      return {key: restore(item) for key, item in value.items()}
    return tuple(map(restore, value)) if isinstance(value, list) else value

  try:
    tree = restore(json.loads(text))
  except RecursionError:
    raise ValueError("it is nested too deep") from None
  if not isinstance(tree, dict):
    raise ValueError(f"a JSON object is needed, not {type(tree).__name__}")
  return ConfigDict(tree).lock()


def _fill(section: ConfigDict, default: ConfigDict) -> None:
  for key, value in default.items():
    if key not in section:
      section[key] = value
    elif key not in FREE and isinstance(value, ConfigDict):
      if isinstance(section[key], ConfigDict):
        _fill(section[key], value)


def fill_in(
  config: ConfigDict, default: ConfigDict
) -> tuple[ConfigDict, list[str]]:
  """A config with the defaults of the keys that it lacks.

  What has the wrong type or shape is left as it is, for `check_keys`.

  Args:
    config: read from a file, perhaps of an earlier version.
    default: has all the keys.

  Returns:
    The config, locked, and "key = value" for each key that was added.

  Raises:
    ValueError: most of the keys are not there: it is a config of something
      else.
  """
  filled = config.copy_and_resolve_references().unlock()
  _fill(filled, default.copy_and_resolve_references())
  present = {*flatten(config), *sections(config)}
  whole = flatten(filled) | {name: {} for name in free_sections(filled)}
  added = [f"{k} = {v!r}" for k, v in sorted(whole.items()) if k not in present]
  if 2 * len(added) > len(whole):
    raise ValueError(f"it lacks {len(added)} of {len(whole)} keys")
  return filled.lock(), added


def difference(old: ConfigDict, new: ConfigDict) -> list[str]:
  """Returns what changed, as lines "key: old -> new", sorted by key."""
  a, b = flatten(from_json(to_json(old))), flatten(from_json(to_json(new)))
  missing = "(none)"
  return [
    f"{key}: {a.get(key, missing)!r} -> {b.get(key, missing)!r}"
    for key in sorted(a.keys() | b.keys())
    if a.get(key, missing) != b.get(key, missing)
  ]
