"""Data sets by their names.

A data set plugs in by its `load` in `DATASETS`:

    load(split, *, seed=0, size=None, **options) -> random access to examples

- `split` is one of `examples.SPLITS`, `size` the largest number of examples.
- `seed` may decide which examples there are; the pipeline decides their order.
- `path`, also optional, is the place of files; "" is the default place.
- Options are the config's `data.options`, which are checked against their
  annotations: numbers, texts, and sequences of them.
- It returns a sequence of dicts as described in `examples`, the same for the
  same arguments, or raises ValueError with advice.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.data import (
  arithmetic,
  gsm8k,
  huggingface,
  jsonl,
  parquet,
  word_sums,
)

HUB = "huggingface"  # data.path is an id of the Hub

DATASETS: dict[str, Callable[..., Any]] = {
  "arithmetic": arithmetic.load,
  "gsm8k": gsm8k.load,
  HUB: huggingface.load,
  "jsonl": jsonl.load,
  "parquet": parquet.load,
  "word_sums": word_sums.load,
}

_OURS = ("split", "path", "seed")  # set by the run, not by data.options


def _is(value: Any, hint: Any) -> bool:
  """Returns True if a value fits an annotation, or it is not understood."""
  origin, parts = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(_is(value, part) for part in parts)
  if origin is Sequence:
    sequence = isinstance(value, (tuple, list))
    return sequence and all(_is(item, parts[0]) for item in value)
  if hint in (int, float):  # a whole number is a float too, True is neither
    return isinstance(value, (int, hint)) and not isinstance(value, bool)
  known = hint in (bool, str, types.NoneType)
  return isinstance(value, hint) if known else True


def _check_options(
  options: Mapping[str, Any], known: Mapping[str, inspect.Parameter]
) -> None:
  """Refuses options of another type than their parameters."""
  for key, value in options.items():
    hint = known[key].annotation if key in known else inspect.Parameter.empty
    wrong = f"--config.data.options.{key} = {value!r}"
    if hint is not inspect.Parameter.empty and not _is(value, hint):
      kind = inspect.formatannotation(hint).replace("collections.abc.", "")
      raise ValueError(f"{wrong}: must be of type {kind}")
    if key == "size" and isinstance(value, int) and value < 1:
      raise ValueError(f"{wrong}: must be 1 or more")


def load(
  name: str,
  split: str,
  path: str = "",
  options: Mapping[str, Any] | None = None,
  **settings: Any,
) -> Any:
  """Opens a data set by its name: random access to examples.

  `options` are a user's arguments of its `load`, `settings` the program's; a
  wrong one, or a data set that cannot be read, is a ValueError.
  """
  if name not in DATASETS:
    known = ", ".join(DATASETS)
    raise ValueError(f"--config.data.name = {name!r}: use one of {known}")
  load_, options = DATASETS[name], dict(options or {})
  known = inspect.signature(load_).parameters
  if path and "path" not in known:
    raise ValueError(f"--config.data.path: the data set {name} has no files")
  named = [key for key, p in known.items() if p.kind is not p.VAR_KEYWORD]
  takes_any = len(named) < len(known)
  takes = [key for key in named if key not in _OURS]
  unknown = [key for key in options if key not in takes and not takes_any]
  if unknown:
    raise ValueError(
      f"--config.data.options.{unknown[0]}: the data set {name} has no such "
      f"option; it takes {', '.join(takes)}"
    )
  _check_options(options, known)
  options |= {"path": path} if path else {}
  settings = {k: v for k, v in settings.items() if k in known or takes_any}
  return load_(split, **(options | settings))
