"""Mixtures of data sets: what the section data.mixture says.

    data.mixture.easy.name = "arithmetic"    a data set; default the part's name
    data.mixture.easy.path, .options         as data.path and data.options
    data.mixture.easy.weight = 3.0           its share of the prompts; default 1
    data.mixture.easy.rewards = ("format",)  of reward.functions; default all

Examples carry their part's name (`data.examples.SOURCE`), which reward
functions see, and by which metrics and accuracies are reported.
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
  """A data set of a mixture, as the config has it.

  Attributes:
    name: Kind of data set.
    path: Path of its files, or "".
    options: keyword arguments of its load.
    weight: its share, up to a factor.
    rewards: labels of the functions that score it, the first of which says what
      a right answer is; none stands for all.
  """

  name: str
  path: str = ""
  options: Mapping[str, Any] = {}
  weight: float = 1.0
  rewards: Sequence[str] = ()


def _source(part: str, settings: Mapping[str, Any]) -> Source:
  options = {"name": part} | dict(settings)
  rewards = options.get("rewards", ())
  if isinstance(rewards, str):  # from a command line
    rewards = tuple(x.strip() for x in rewards.split(",") if x.strip())
  return Source(**options | {"rewards": tuple(map(label, rewards))})


def sources(settings: TrainSettings) -> dict[str, Source]:
  """The data sets of a valid config's mixture by their names in it, sorted."""
  section = sorted(settings.data.mixture.items())
  return {part: _source(part, options) for part, options in section}


def scored_by(settings: TrainSettings) -> dict[str, list[str]]:
  """Returns the data sets that a reward function is for, by its label.

  Functions that score all of them are not in it: none are where nothing is
  mixed.
  """
  named = sources(settings)
  labels = list(map(label, settings.reward.functions))
  data_sets = {
    name: [s for s, one in named.items() if name in (one.rewards or labels)]
    for name in labels
  }
  return {k: x for k, x in data_sets.items() if len(x) < len(named)}


def judges(settings: TrainSettings) -> dict[str, str]:
  """The function that says what a right answer is, by data set."""
  default = label(settings.reward.functions[0])
  return {
    part: (*one.rewards, default)[0] for part, one in sources(settings).items()
  }


def errors(
  settings: TrainSettings, flat_config: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each error of a mixture: setting, value, what to do.

  Args:
    settings: Settings of the run.
    flat_config: The same by dotted path.
  """
  prefix = f"{SECTION}."
  parts, lines = settings.data.mixture, []
  if not parts:
    return []
  for field in flat_config:
    if field.startswith("data.options.") or (
      field == "data.path" and flat_config[field]
    ):
      remedy = (
        f"is of one data set: write {prefix}NAME.{field[5:]}, or no mixture"
      )
      lines.append(config_error(field, flat_config[field], remedy))
  labels = [
    label(x) for x in flat_config["reward.functions"] if isinstance(x, str)
  ]
  for part, options in parts.items():
    lines += _part(f"{prefix}{part}", part, options, labels)
  if lines:
    return lines
  rewards_of_parts = [
    _source(part, options).rewards or labels for part, options in parts.items()
  ]
  idle = sorted(
    set(labels) - {name for names in rewards_of_parts for name in names}
  )
  if idle:
    remedy = f"no data set of data.mixture is scored by {idle[0]}: leave it out"
    lines.append(
      config_error("reward.functions", flat_config["reward.functions"], remedy)
    )
  return lines


def _part(
  field: str, part: str, options: Any, labels: Sequence[str]
) -> list[str]:
  """Returns a line for each error of one data set of a mixture."""
  if not isinstance(options, Mapping):
    remedy = f"is a section: {field}.name, .path, .options, .weight, .rewards"
    return [config_error(field, options, remedy)]
  errors = []

  def need(key, holds, remedy):
    if not holds:
      errors.append(config_error(f"{field}.{key}", options[key], remedy))

  for key in options:
    if key not in Source._fields:
      guess = nearest(key, Source._fields)
      hint = f"; did you mean {guess}?" if guess else ""
      need(key, False, f"unknown: use {', '.join(Source._fields)}{hint}")
  if not re.fullmatch(r"[\w-]+", part):
    remedy = "names metrics: use letters, digits, '_' and '-'"
    errors.append(config_error(SECTION, part, remedy))
  source = {"name": part, "path": "", "options": {}, "weight": 1.0} | options
  if source["name"] not in DATASETS:
    remedy = f"use one of {', '.join(DATASETS)}"
    errors.append(config_error(f"{field}.name", source["name"], remedy))
  weight = source["weight"]
  number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
  remedy = "must be a number more than 0"
  need("weight", number and 0 < weight < math.inf, remedy)
  need("path", isinstance(source["path"], str), "must be a text")
  need("options", isinstance(source["options"], Mapping), "is a section")
  rewards = options.get("rewards", ())
  texts = [rewards] if isinstance(rewards, str) else rewards
  if not isinstance(texts, Sequence) or not all(
    isinstance(x, str) for x in texts
  ):
    need("rewards", False, "must be names of reward.functions")
    return errors
  names = _source(part, {"rewards": rewards}).rewards
  good = len(set(names)) == len(names) and set(names) <= set(labels)
  need("rewards", good, f"names, each once, among reward.functions: {labels}")
  return errors


def by_source(
  settings: TrainSettings, examples: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
  """Returns the examples' rows by data set; empty where nothing is mixed."""
  rows_of: dict[str, list[int]] = {name: [] for name in sources(settings)}
  for i, example in enumerate(examples if rows_of else ()):
    rows_of[example[SOURCE]].append(i)
  return {name: np.array(rows) for name, rows in rows_of.items() if rows}


def metrics(
  settings: TrainSettings,
  examples: Sequence[Mapping[str, Any]],
  rewards: Float[np.ndarray, "B G"],
) -> dict[str, int | float]:
  """A step's numbers by data set: none where nothing is mixed.

  Args:
    settings: the run's.
    examples: [B].
    rewards: not finite where there is none.

  Returns:
    `NAME/prompts`, a count; and, as the metrics of all, `NAME/reward_mean` (of
    the completions with a reward; left out where there is none) and
    `NAME/zero_variance_groups`, of the rewards as they came, whatever is
    compared of them.
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
