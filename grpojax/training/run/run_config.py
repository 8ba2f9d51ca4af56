"""The config of a run directory, and what it may be resumed with."""

import dataclasses
import os
import pathlib
import re
from typing import NamedTuple

from ml_collections import ConfigDict

from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli import settings as settings_lib
from grpojax.training.config import (
  SETTINGS,
  default_config,
  from_config,
  to_config,
)
from grpojax.training.run import hub_pins, run_storage
from grpojax.training.settings.run import TrainSettings

CONFIG = "config.json"  # the resolved config

CHANGEABLE = (
  r"steps|log\..*|eval\..*|checkpoint\..*|stop\..*|profile\..*|data\.too_long|"
  r"reward\.(workers|timeout)|mesh\..*|optim\.(micro_batches|packing)|"
  r"model\.(remat|reference)|sampling\.(stages|compact|slots|parts)"
)
"""Settings that a run may be resumed with other values of: they do not change
what has been done."""

DATE = "date_string"  # of data.template_options


class SavedConfig(NamedTuple):
  """The config of a run, with the defaults of settings younger than it."""

  config: ConfigDict
  added: list[str]  # lines "key = value" of those settings


def saved(path: str | os.PathLike) -> SavedConfig | None:
  """Reads the config of a run directory, None where it holds none of ours."""
  try:
    config = config_lib.from_json((pathlib.Path(path) / CONFIG).read_text())
    if "path" not in (config.get("model") or {}):
      return None
    config, added = config_lib.fill_in(config, default_config())
    return SavedConfig(config, added)
  except (OSError, TypeError, ValueError):
    return None


def say_added(path: str | os.PathLike) -> None:
  """Prints which settings are younger than a run, and their values for it."""
  run = saved(path)
  if run and run.added:
    print(f"{path} is older than these settings: {', '.join(run.added)}")


def read_config(path: str | os.PathLike) -> ConfigDict:
  """Returns the config of a run directory.

  Raises:
    ValueError: it has none, or one with wrong keys or values.
  """
  run = saved(path)
  if run is None:
    raise ValueError(
      f"no run at {path}: give the run directory of a training run, the one "
      f"with its {CONFIG} and {run_storage.CHECKPOINTS}/"
    )
  try:
    from_config(run.config)
  except ValueError as error:
    raise ValueError(f"{pathlib.Path(path) / CONFIG}: {error}") from None
  return run.config


def changed(
  path: str | os.PathLike, settings: TrainSettings
) -> tuple[list[str], list[str]]:
  """Compares settings with those that a run was started with.

  Returns:
    Lines "key: its value -> yours": those that a run may be resumed with, and
    those that it may not.
  """
  run = saved(path)
  if not run:
    return [], []
  lines = config_lib.difference(run.config, to_config(settings))
  if settings_lib.key_errors(SETTINGS, run.config):
    return [], lines  # no run of ours has written that
  may = [x for x in lines if re.match(rf"({CHANGEABLE}): ", x)]
  return may, [x for x in lines if x not in may]


def pin_date(settings: TrainSettings, date: str) -> TrainSettings:
  """Returns settings whose chat template is given this date for today's."""
  options = settings.data.template_options | {DATE: date}
  data = dataclasses.replace(settings.data, template_options=options)
  return dataclasses.replace(settings, data=data)


def with_pins(
  path: str | os.PathLike, settings: TrainSettings
) -> TrainSettings:
  """Returns settings with what a run was started with: its date and commits.

  They are the date that its chat template was given, and the commits of models
  and data on the Hub. A date of the settings' own stays.

  Args:
    path: A run directory, or none yet.
    settings: Settings of the run.
  """
  run = saved(path)
  if run is None:
    return settings
  date = config_lib.flatten(run.config).get(f"data.template_options.{DATE}")
  if date is not None and DATE not in settings.data.template_options:
    settings = pin_date(settings, date)
  return hub_pins.with_commits(settings, run.config.get("commits") or ())
