"""Mixtures of data sets: the section data.mixture.

    data.mixture.easy.name = "arithmetic"    data set; default: the key, easy
    data.mixture.easy.path, .options         like data.path and data.options
    data.mixture.easy.weight = 3.0           relative share; default: 1
    data.mixture.easy.rewards = ("format",)  its reward.functions; default: all

An example holds the name of its data set (here easy) under the key
`data.examples.SOURCE`, for reward functions and for metrics per data set.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from grpojax.core import group_axis
from grpojax.data.datasets import DATASETS
from grpojax.data.examples import SOURCE
from grpojax.rewards.functions import label
from grpojax.runtime.cli.configs import config_error, nearest
from grpojax.training.settings.run import TrainSettings

SECTION = "data.mixture"


class Source(NamedTuple):
  """Data set of a mixture."""

  name: str  # name in `DATASETS`
  path: str = ""
  options: Mapping[str, Any] = {}  # keyword arguments of its load function
  weight: float = 1.0  # relative share of prompts
  # Names of reward functions, () = all; the first one judges correctness.
  rewards: Sequence[str] = ()


def _source(part: str, settings: Mapping[str, Any]) -> Source:
  options = {"name": part} | dict(settings)
  rewards = options.get("rewards", ())
  if isinstance(rewards, str):  # "a,b" on a command line
    rewards = tuple(x.strip() for x in rewards.split(",") if x.strip())
  return Source(**options | {"rewards": tuple(map(label, rewards))})


def sources(settings: TrainSettings) -> dict[str, Source]:
  """Returns the data sets of a valid mixture, sorted by name."""
  section = sorted(settings.data.mixture.items())
  return {part: _source(part, options) for part, options in section}


def scored_by(settings: TrainSettings) -> dict[str, list[str]]:
  """Maps reward functions to the data sets they score, if these are not all."""
  parts = sources(settings)
  scored = {}
  for name in map(label, settings.reward.functions):
    names = [k for k, x in parts.items() if not x.rewards or name in x.rewards]
    if len(names) < len(parts):
      scored[name] = names
  return scored


def judges(settings: TrainSettings) -> dict[str, str]:
  """Maps each data set to the reward function that judges correctness."""
  default = label(settings.reward.functions[0])
  parts = sources(settings)
  return {name: (*x.rewards, default)[0] for name, x in parts.items()}


def errors(settings: TrainSettings) -> list[str]:
  """Returns an error line (setting, value, remedy) per mistake in a mixture."""
  parts = settings.data.mixture
  lines = []
  data = settings.data
  if not parts:
    return []
  unused = {f"options.{name}": value for name, value in data.options.items()}
  if data.path:
    unused["path"] = data.path
  for field, value in unused.items():
    remedy = f"has no effect in a mixture: use {SECTION}.NAME.{field}"
    lines.append(config_error(f"data.{field}", value, remedy))
  functions = settings.reward.functions
  labels = [label(x) for x in functions if isinstance(x, str)]
  for part, options in parts.items():
    lines += _part_errors(part, options, labels)
  if lines:
    return lines
  used = [_source(part, x).rewards or labels for part, x in parts.items()]
  if idle := set(labels).difference(*used):
    remedy = f"no data set of {SECTION} uses the reward {min(idle)}: remove it"
    lines.append(config_error("reward.functions", functions, remedy))
  return lines


def _part_errors(part: str, options: Any, labels: Sequence[str]) -> list[str]:
  """Returns an error line per mistake in one data set of a mixture."""
  field = f"{SECTION}.{part}"
  if not isinstance(options, Mapping):
    remedy = (
      f"is a section: use {field}.name, .path, .options, .weight, .rewards"
    )
    return [config_error(field, options, remedy)]
  errors = []
  if not re.fullmatch(r"[\w-]+", part):
    remedy = "is part of metric names: use letters, digits, '_' and '-'"
    errors.append(config_error(SECTION, part, remedy))
  for key in sorted({*options} - {*Source._fields}):
    guess = nearest(key, Source._fields)
    hint = f"; did you mean {guess}?" if guess else ""
    remedy = f"unknown key: use {', '.join(Source._fields)}{hint}"
    errors.append(config_error(f"{field}.{key}", options[key], remedy))

  values = Source(part)._asdict() | dict(options)
  weight, rewards = values["weight"], values["rewards"]
  number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
  names = [rewards] if isinstance(rewards, str) else rewards
  known = isinstance(names, Sequence) and all(isinstance(x, str) for x in names)
  if known:
    names = _source(part, {"rewards": rewards}).rewards
    known = len(set(names)) == len(names) and set(names) <= set(labels)
  kinds = list(DATASETS)
  for key, holds, remedy in (
    ("name", values["name"] in kinds, f"use one of {', '.join(kinds)}"),
    ("weight", number and 0 < weight < math.inf, "must be a positive number"),
    ("path", isinstance(values["path"], str), "must be a string"),
    ("options", isinstance(values["options"], Mapping), "must be a dict"),
    ("rewards", known, f"use names of reward.functions, each once: {labels}"),
  ):
    if not holds:
      errors.append(config_error(f"{field}.{key}", values[key], remedy))
  return errors


def by_source(
  settings: TrainSettings, examples: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
  """Maps data sets to the indices of their examples; {} without a mixture."""
  rows_of: dict[str, list[int]] = {name: [] for name in sources(settings)}
  for i, example in enumerate(examples if rows_of else ()):
    rows_of[example[SOURCE]].append(i)
  return {name: np.array(rows) for name, rows in rows_of.items() if rows}


def metrics(
  settings: TrainSettings,
  examples: Sequence[Mapping[str, Any]],
  rewards: Float[np.ndarray, "B G"],
) -> dict[str, int | float]:
  """Returns a step's metrics per data set; {} without a mixture.

  The metrics are `NAME/prompts`, `NAME/reward_mean` (of finite rewards, if any)
  and `NAME/zero_variance_groups`, of rewards before reward.aggregation.
  """
  row: dict[str, int | float] = {}
  for name, rows in by_source(settings, examples).items():
    part = np.where(np.isfinite(rewards[rows]), rewards[rows], np.nan)
    row[f"{name}/prompts"] = len(rows)
    if not np.isnan(part).all():
      row[f"{name}/reward_mean"] = float(np.nanmean(part))
    equal = ~group_axis.varies(part) & (rewards.shape[-1] > 1)
    row[f"{name}/zero_variance_groups"] = float(np.mean(equal))
  return row
