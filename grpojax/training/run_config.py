"""The config of a run directory, and what it may be resumed with."""

import os
import pathlib
import re

from ml_collections import ConfigDict

from grpojax.runtime import config as config_lib
from grpojax.training import run_storage, sources
from grpojax.training.config import (
  WORDS,
  default_config,
  from_config,
)

CONFIG = "config.json"  # the resolved config

CHANGEABLE = (
  r"steps|log\..*|eval\..*|checkpoint\..*|stop\..*|profile\..*|data\.too_long|"
  r"reward\.(workers|timeout)|mesh\..*|optim\.(micro_batches|packing)|"
  r"model\.(remat|reference)|sampling\.(stages|compact|slots|parts)"
)
"""The settings that a run may be resumed with other values of: they do not
change what has been done."""

_DATE = "data.template_options.date_string"


def saved(path: pathlib.Path) -> tuple[ConfigDict, list[str]] | None:
  """The config of a run directory, None where it holds none of ours.

  A setting that did not exist when the run was started has its default: new
  settings cost older runs nothing.

  Returns:
    The config, and "key = value" for each such setting.
  """
  try:
    found = config_lib.from_json((path / CONFIG).read_text())
    if "path" not in (found.get("model") or {}):
      return None
    return config_lib.fill_in(found, default_config())
  except (OSError, TypeError, ValueError):
    return None


def say_added(path: str | os.PathLike) -> None:
  """Says which settings are younger than a run, and what they are for it."""
  found = saved(pathlib.Path(path))
  if found and found[1]:
    print(f"{path} is older than these settings: {', '.join(found[1])}")


def read_config(run: str | os.PathLike) -> ConfigDict:
  """The config of a run directory.

  Raises:
    ValueError: it has none, or one with wrong keys or values.
  """
  found = saved(pathlib.Path(run))
  if found is None:
    raise ValueError(
      f"no run at {run}: give the run directory of a training run, the one "
      f"with its {CONFIG} and {run_storage.CHECKPOINTS}/"
    )
  try:
    from_config(found[0])
  except ValueError as error:
    raise ValueError(f"{pathlib.Path(run) / CONFIG}: {error}") from None
  return found[0]


def changed(
  path: str | os.PathLike, config: ConfigDict
) -> tuple[list[str], list[str]]:
  """How a config differs from the one that a run was started with.

  Args:
    path: a run directory, or none yet.
    config: the resolved config.

  Returns:
    What a run may be resumed with, and what it may not: lines "key: its value
    -> yours".
  """
  found = saved(pathlib.Path(path))
  if not found:
    return [], []
  lines = config_lib.difference(found[0], config)
  if config_lib.check_keys(found[0], default_config(), WORDS):
    return [], lines  # no run of ours has written that
  may = [x for x in lines if re.match(rf"({CHANGEABLE}): ", x)]
  return may, [x for x in lines if x not in may]


def with_date(path: str | os.PathLike, config: ConfigDict) -> ConfigDict:
  """A config with the date that a run's chat template was first given.

  Args:
    path: a run directory, or none yet.
    config: the resolved config; a date of its own stays.
  """
  found = saved(pathlib.Path(path))
  if not found or _DATE in config_lib.flatten(config):
    return config
  date = config_lib.flatten(found[0]).get(_DATE)
  return config if date is None else pin_date(config, date)


def with_commits(path: str | os.PathLike, config: ConfigDict) -> ConfigDict:
  """A config with the commits of the Hub that a run was started with.

  Args:
    path: a run directory, or none yet.
    config: the resolved config.
  """
  found = saved(pathlib.Path(path))
  if not found or not found[0].get("commits"):
    return config
  settings = sources.with_commits(from_config(config), from_config(found[0]))
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.commits = settings.commits
  return config


def pin_date(config: ConfigDict, date: str) -> ConfigDict:
  """A config whose chat template is given this date for today's."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.data.template_options.date_string = date
  return config
