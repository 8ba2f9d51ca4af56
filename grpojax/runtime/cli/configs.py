"""Helpers for configs: dotted names, error messages, JSON and differences."""

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

import flax.traverse_util
from ml_collections import ConfigDict


def names(config: ConfigDict) -> set[str]:
  """Returns the dotted names of a config's values and sections."""
  flat = flax.traverse_util.flatten_dict(
    config.to_dict(), keep_empty_nodes=True
  )
  return {".".join(path[:i]) for path in flat for i in range(1, len(path) + 1)}


def flatten(config: ConfigDict) -> dict[str, Any]:
  """Returns values by dotted name: `{"optim.learning_rate": 1e-4, ...}`."""
  return flax.traverse_util.flatten_dict(config.to_dict(), sep=".")


def nearest(name: str, candidates: Sequence[str]) -> str | None:
  """Returns the most similar dotted name, or None if none is similar.

  Compares whole names and last elements. Initials (lr for learning_rate) and
  whole words (warmup for warmup_steps) are similar, too.
  """
  typed = name.split(".")[-1]

  def likeness(a, b):
    return difflib.SequenceMatcher(None, a, b).ratio()

  def score(candidate):
    element = candidate.split(".")[-1]
    initials = "".join(word[:1] for word in element.split("_"))
    is_part = typed == initials or f"_{typed}_" in f"_{element}_"
    short = len(typed) > 1 and is_part
    last = 0.9 if short else likeness(typed, element)
    whole = likeness(name, candidate)
    return max(last, whole), whole

  best = max(candidates, key=score, default=None)
  return best if best is not None and score(best)[0] >= 0.8 else None


def config_error(field: str, value: Any, remedy: str) -> str:
  """Returns an error message with a setting's name and value, and a remedy."""
  return f"--config.{field} = {value!r}: {remedy}"


def below(section: str, text: str) -> str:
  """Inserts a section's name before the settings' names in an error message."""
  return text.replace("--config.", f"--config.{section}.")


def name_errors(name: str) -> list[str]:
  """Returns an error message if a config's name cannot name a directory."""
  if re.fullmatch(r"[\w.-]*[\w-][\w.-]*", name):
    return []
  remedy = "names a directory: use letters, digits, '_', '-' and '.'"
  return [config_error("name", name, remedy)]


def refuse(config_errors: Sequence[str]) -> None:
  """Raises ValueError with a line per error, if there are any."""
  if config_errors:
    raise ValueError("\n  ".join(["the config is not valid:", *config_errors]))


def to_json(config: ConfigDict) -> str:
  """Returns a config as JSON text with sorted keys."""
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
  """Parses the JSON text of a config, and locks it; lists become tuples.

  ValueError if the text is not a JSON object.
  """

  def restore(value):
    if isinstance(value, dict):
      return {key: restore(item) for key, item in value.items()}
    return tuple(map(restore, value)) if isinstance(value, list) else value

  try:
    tree = restore(json.loads(text))
  except RecursionError:
    raise ValueError("its JSON is nested too deeply") from None
  if not isinstance(tree, dict):
    raise ValueError(f"must be a JSON object, not {type(tree).__name__}")
  return ConfigDict(tree).lock()


def difference(old: ConfigDict, new: ConfigDict) -> list[str]:
  """Returns a line "key: old -> new" per changed value, sorted by key."""
  a, b = flatten(from_json(to_json(old))), flatten(from_json(to_json(new)))
  missing = "(none)"
  return [
    f"{key}: {a.get(key, missing)!r} -> {b.get(key, missing)!r}"
    for key in sorted(a.keys() | b.keys())
    if a.get(key, missing) != b.get(key, missing)
  ]
