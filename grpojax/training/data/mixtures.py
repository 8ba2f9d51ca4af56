"""Mixtures of data sets: the section data.mixture.

    data.mixture.easy.name = "arithmetic"    a data set; default the part's name
    data.mixture.easy.path, .options         as data.path and data.options
    data.mixture.easy.weight = 3.0           its share of the prompts; default 1
    data.mixture.easy.rewards = ("format",)  of reward.functions; default all

Examples carry their part's name (`data.examples.SOURCE`), for reward functions
and for metrics and accuracies by data set.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from grpojax.data.datasets import DATASETS
from grpojax.data.examples import SOURCE
from grpojax.rewards.functions import label
from grpojax.runtime.cli.config import config_error, nearest
from grpojax.training.settings.run import TrainSettings

SECTION = "data.mixture"


class Source(NamedTuple):
  """A data set of a mixture, as in the config."""

  name: str  # kind of data set
  path: str = ""  # path of its files, or ""
  options: Mapping[str, Any] = {}  # keyword arguments of its load
  weight: float = 1.0  # its share, up to a factor
  # Labels of its reward functions, or () for all. The first decides on right
  # answers.
  rewards: Sequence[str] = ()


def _source(part: str, settings: Mapping[str, Any]) -> Source:
  options = {"name": part} | dict(settings)
  rewards = options.get("rewards", ())
  if isinstance(rewards, str):  # from a command line
    rewards = tuple(x.strip() for x in rewards.split(",") if x.strip())
  return Source(**options | {"rewards": tuple(map(label, rewards))})


def sources(settings: TrainSettings) -> dict[str, Source]:
  """Returns the data sets of a valid mixture by their names, sorted."""
  section = sorted(settings.data.mixture.items())
  return {part: _source(part, options) for part, options in section}


def scored_by(settings: TrainSettings) -> dict[str, list[str]]:
  """Returns the data sets of each reward function that is not for all."""
  named, sources_of = sources(settings), {}
  for name in map(label, settings.reward.functions):
    own = [k for k, x in named.items() if not x.rewards or name in x.rewards]
    if len(own) < len(named):
      sources_of[name] = own
  return sources_of


def judges(settings: TrainSettings) -> dict[str, str]:
  """Returns the function that decides on right answers, by data set."""
  default = label(settings.reward.functions[0])
  return {
    part: (*one.rewards, default)[0] for part, one in sources(settings).items()
  }


def errors(settings: TrainSettings) -> list[str]:
  """Returns a line for each error of a mixture: setting, value, what to do."""
  parts, lines, data = settings.data.mixture, [], settings.data
  if not parts:
    return []
  of_one = {f"options.{name}": value for name, value in data.options.items()}
  if data.path:
    of_one["path"] = data.path
  for field, value in of_one.items():
    remedy = f"is of one data set: write {SECTION}.NAME.{field}, or no mixture"
    lines.append(config_error(f"data.{field}", value, remedy))
  functions = settings.reward.functions
  labels = [label(x) for x in functions if isinstance(x, str)]
  for part, options in parts.items():
    lines += _part(part, options, labels)
  if lines:
    return lines
  used = [_source(part, x).rewards or labels for part, x in parts.items()]
  if idle := set(labels).difference(*used):
    remedy = f"no data set of {SECTION} is scored by {min(idle)}: leave it out"
    lines.append(config_error("reward.functions", functions, remedy))
  return lines


def _part(part: str, options: Any, labels: Sequence[str]) -> list[str]:
  """Returns a line for each error of one data set of a mixture."""
  field = f"{SECTION}.{part}"
  if not isinstance(options, Mapping):
    remedy = f"is a section: {field}.name, .path, .options, .weight, .rewards"
    return [config_error(field, options, remedy)]
  errors = []
  if not re.fullmatch(r"[\w-]+", part):
    remedy = "names metrics: use letters, digits, '_' and '-'"
    errors.append(config_error(SECTION, part, remedy))
  for key in sorted({*options} - {*Source._fields}):
    guess = nearest(key, Source._fields)
    hint = f"; did you mean {guess}?" if guess else ""
    remedy = f"unknown: use {', '.join(Source._fields)}{hint}"
    errors.append(config_error(f"{field}.{key}", options[key], remedy))

  def positive(weight) -> bool:
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    return number and 0 < weight < math.inf

  def of_labels(rewards) -> bool:
    names = [rewards] if isinstance(rewards, str) else rewards
    if not isinstance(names, Sequence) or not all(
      isinstance(name, str) for name in names
    ):
      return False
    names = _source(part, {"rewards": rewards}).rewards
    return len(set(names)) == len(names) and set(names) <= set(labels)

  names = list(DATASETS)
  values = Source(part)._asdict() | dict(options)
  for key, holds, remedy in (
    ("name", names.__contains__, f"use one of {', '.join(names)}"),
    ("weight", positive, "must be a number more than 0"),
    ("path", lambda path: isinstance(path, str), "must be a text"),
    ("options", lambda x: isinstance(x, Mapping), "is a section"),
    (
      "rewards",
      of_labels,
      f"names, each once, among reward.functions: {labels}",
    ),
  ):
    if not holds(values[key]):
      errors.append(config_error(f"{field}.{key}", values[key], remedy))
  return errors


def by_source(
  settings: TrainSettings, examples: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
  """Returns the examples' rows by data set; empty without a mixture."""
  rows_of: dict[str, list[int]] = {name: [] for name in sources(settings)}
  for i, example in enumerate(examples if rows_of else ()):
    rows_of[example[SOURCE]].append(i)
  return {name: np.array(rows) for name, rows in rows_of.items() if rows}


def metrics(
  settings: TrainSettings,
  examples: Sequence[Mapping[str, Any]],
  rewards: Float[np.ndarray, "B G"],
) -> dict[str, int | float]:
  """Returns a step's metrics by data set; empty without a mixture.

  They are `NAME/prompts`, `NAME/reward_mean` (of the completions with a reward,
  if any) and `NAME/zero_variance_groups` of the rewards before aggregation.
  """
  row: dict[str, int | float] = {}
  for name, rows in by_source(settings, examples).items():
    own = np.where(np.isfinite(rewards[rows]), rewards[rows], np.nan)
    known = ~np.isnan(own)
    best = np.max(own, -1, where=known, initial=-np.inf)
    worst = np.min(own, -1, where=known, initial=np.inf)
    row[f"{name}/prompts"] = len(rows)
    if known.any():
      row[f"{name}/reward_mean"] = float(np.nanmean(own))
    equal = (best <= worst) & (rewards.shape[-1] > 1)
    row[f"{name}/zero_variance_groups"] = float(np.mean(equal))
  return row
