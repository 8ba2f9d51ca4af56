"""Training runs that are made up, for the studies that are made of them."""

import csv
import json

import pytest

from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.files import records
from grpojax.training.config import to_config
from grpojax.training.run import fit, run_directory


def write_run(settings, directory, rewards, accuracy, **columns):
  """Writes what a study reads of a finished run, one reward a step."""
  directory.mkdir(parents=True)
  rows = [
    {"step": step, "reward_mean": reward} | columns
    for step, reward in enumerate(rewards, 1)
  ]
  rows.append({"step": len(rewards), "accuracy": accuracy})
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (directory / run_directory.METRICS).write_text(text)
  (directory / run_directory.CONFIG).write_text(
    config_lib.to_json(to_config(settings))
  )
  summary = {"steps": len(rewards), "accuracy_before": 0.0}
  summary |= {"accuracy_after": accuracy}
  records.write_json(directory / run_directory.SUMMARY, summary)
  return summary


@pytest.fixture
def made_up():
  return write_run


@pytest.fixture
def rows_of():
  """Reads a CSV file."""
  return lambda path: list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def small(toy_task, toy_model):
  """Returns `(settings) -> words` of a study that trains on the toy task."""

  def words(settings):
    skipped = {"name", *(key.removeprefix("train.") for key in settings)}
    of_toy = [
      word.replace("--config.", "--config.train.")
      for word in toy_task.arguments(toy_model)
      if word.removeprefix("--config.").split("=")[0] not in skipped
    ]
    return of_toy + [f"--config.{k}={v}" for k, v in settings.items() if v]

  return words


@pytest.fixture
def interrupt_third(monkeypatch):
  """Puts `train` in the place of `fit.run`, and Ctrl-C in its third call."""

  def put(train):
    names = []

    def run(settings, directory):
      names.append(settings.name)
      if len(names) == 3:
        raise KeyboardInterrupt
      return train(settings, directory)

    monkeypatch.setattr(fit, "run", run)
    return names

  return put
