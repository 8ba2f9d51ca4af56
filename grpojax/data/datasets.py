"""Data sets by name.

To add a data set, add its `load` to `DATASETS`:

    load(split, *, seed=0, size=None, **options) -> sequence of examples

- `split` is one of `examples.SPLITS`, `size` the maximum number of examples.
- `seed` may select the examples; `pipeline` decides their order.
- `path` is the location of the files, if any; "" is the default location.
- `options` are data.options, checked against the parameters' annotations.
- Equal arguments must return equal `examples`. Wrong arguments raise ValueError
  with advice.
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

HUB = "huggingface"  # data.path is a name on the Hub

DATASETS: dict[str, Callable[..., Any]] = {
  "arithmetic": arithmetic.load,
  "gsm8k": gsm8k.load,
  HUB: huggingface.load,
  "jsonl": jsonl.load,
  "parquet": parquet.load,
  "word_sums": word_sums.load,
}

_SET_BY_RUN = ("split", "path", "seed")  # not by data.options


def _has_type(value: Any, hint: Any) -> bool:
  """Returns True if a value fits an annotation (always if it is unknown)."""
  origin, parts = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(_has_type(value, part) for part in parts)
  if origin is Sequence:
    sequence = isinstance(value, (tuple, list))
    return sequence and all(_has_type(item, parts[0]) for item in value)
  if hint in (int, float):  # ints are valid floats; bools are neither
    return isinstance(value, (int, hint)) and not isinstance(value, bool)
  return hint not in (bool, str, types.NoneType) or isinstance(value, hint)


def load(
  name: str,
  split: str,
  path: str = "",
  options: Mapping[str, Any] | None = None,
  **settings: Any,
) -> Any:
  """Opens a data set by name and returns a sequence of its examples.

  The data set's `load` gets all `options`, and the `settings` for which it has
  parameters. ValueError for a wrong option or an unreadable data set.
  """
  if name not in DATASETS:
    known = ", ".join(DATASETS)
    raise ValueError(f"--config.data.name = {name!r}: use one of {known}")
  load_ = DATASETS[name]
  options = dict(options or {})
  known = inspect.signature(load_).parameters
  if path and "path" not in known:
    raise ValueError(f"the data set {name} has no files: remove data.path")
  named = [key for key, p in known.items() if p.kind is not p.VAR_KEYWORD]
  takes_any = len(named) < len(known)
  takes = [key for key in named if key not in _SET_BY_RUN]
  unknown = [key for key in options if key not in takes and not takes_any]
  if unknown:
    raise ValueError(
      f"--config.data.options.{unknown[0]}: the data set {name} has no such "
      f"option; it takes {', '.join(takes)}"
    )
  for key, value in options.items():
    hint = known[key].annotation if key in known else inspect.Parameter.empty
    setting = f"--config.data.options.{key} = {value!r}"
    if hint is not inspect.Parameter.empty and not _has_type(value, hint):
      kind = inspect.formatannotation(hint).replace("collections.abc.", "")
      raise ValueError(f"{setting}: must be of type {kind}")
    if key == "size" and isinstance(value, int) and value < 1:
      raise ValueError(f"{setting}: must be 1 or more")
  options |= {"path": path} if path else {}
  settings = {k: v for k, v in settings.items() if k in known or takes_any}
  return load_(split, **(options | settings))
