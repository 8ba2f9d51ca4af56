"""What the studies share: a run directory, tables and pictures.

A study's directory, by default runs/NAME, holds config.json, the partial
results that make it resumable, and at the end results.csv, summary.json and
NAME.png. The same command resumes; another config is refused.
"""

import contextlib
import csv
import io
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime import command_line, disk, interrupts, pictures, records
from grpojax.runtime import config as config_lib
from grpojax.runtime import settings as settings_lib
from grpojax.runtime.settings import Section, setting, to_config

FLAGS = {"run_dir": setting("", 'where to write; "" = runs/NAME')}
"""The flags of every study."""


def open_study(
  argv: Sequence[str],
  program: str,
  declared: Section,
  problems: Callable[[ConfigDict], list[str]],
  about: str,
) -> tuple[ConfigDict, pathlib.Path]:
  """Reads a study's command line, and starts or goes on with its directory.

  Args:
    argv: the arguments: --config=FILE, --config.key=value, --run_dir=DIR.
    program: how the study is called, for --help.
    declared: the settings; `name` names the run directory.
    problems: what is wrong with values that are in their ranges, a line each.
    about: what the study does, for --help: its docstring.

  Returns:
    The config and the run directory.

  Raises:
    SystemExit: with a message, for a command line or a config that cannot be
      used, or a directory of something else.
  """
  with command_line.usage_errors():
    config, flags = command_line.parse(
      argv, FLAGS, declared, program, about=about
    )
    default, words = to_config(declared), settings_lib.words(declared)
    wrong = config_lib.check_keys(config, default, words)
    wrong = wrong or config_lib.name_problems(config.name)
    wrong = wrong or settings_lib.problems(declared, config_lib.flatten(config))
    config_lib.refuse(wrong or problems(config))
    directory = pathlib.Path(flags.run_dir or f"runs/{config.name}")
    disk.check_no_url(directory, "--run_dir")
    _open(directory, config, default)
  return config, directory


@contextlib.contextmanager
def resumable() -> Iterator[None]:
  """An interrupt from the keyboard ends in a line that says what is kept."""
  try:
    yield
  except KeyboardInterrupt:
    print("interrupted; the same command goes on with what is not done yet")
    interrupts.exit_program()


def _open(
  directory: pathlib.Path, config: ConfigDict, default: ConfigDict
) -> None:
  if directory.exists() and not directory.is_dir():
    raise ValueError(f"{directory} is a file; give a directory as --run_dir")
  path = directory / "config.json"
  if path.exists():
    try:
      saved = config_lib.from_json(path.read_text())
      saved, added = config_lib.fill_in(saved, default)
    except (OSError, TypeError, ValueError) as error:
      raise ValueError(f"{path} is no study's config: {error}") from error
    if added:
      print(f"{directory} is older than these settings: {', '.join(added)}")
    changed = config_lib.difference(saved, config)
    if changed:
      raise ValueError(
        f"{directory} holds results of another config (its value -> yours):\n  "
        + "\n  ".join(changed)
        + "\ngive another --run_dir, or its own values to resume"
      )
  elif directory.exists() and any(directory.iterdir()):
    raise ValueError(
      f"{directory} is not empty and is no study: give a new directory as "
      "--run_dir"
    )
  else:
    directory.mkdir(parents=True, exist_ok=True)
    records.write_text(path, config_lib.to_json(config))


def write_csv(
  path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]
) -> None:
  """Writes rows as CSV, whole or not at all; the first row names the columns.

  Raises:
    ValueError: a row has a column that the first one lacks.
  """
  text = io.StringIO()
  writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  records.write_text(path, text.getvalue())


def new_figure(rows: int, columns: int, width: float = 4.0):
  """A figure and its axes [rows, columns]; each `width` inches wide."""
  size = (width * columns, 0.8 * width * rows)
  return pictures.new_figure(rows, columns, size)
