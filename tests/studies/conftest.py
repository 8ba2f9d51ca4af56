"""Files of invented training runs, and arguments of small studies."""

import csv
import json

import pytest

from grpojax.runtime.cli import configs
from grpojax.runtime.files import records
from grpojax.training.config import to_config
from grpojax.training.files import run_directory
from grpojax.training.run import fit


def write_run(settings, directory, rewards, accuracy, **columns):
  """Writes the files of a finished run, with a reward per step."""
  directory.mkdir(parents=True)
  rows = [
    {"step": step, "reward_mean": reward} | columns
    for step, reward in enumerate(rewards, 1)
  ]
  rows.append({"step": len(rewards), "accuracy": accuracy})
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (directory / run_directory.METRICS).write_text(text)
  (directory / run_directory.CONFIG).write_text(
    configs.to_json(to_config(settings))
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
  """Returns `(settings) -> words` for a study on the toy task."""

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
def run_interrupted(monkeypatch):
  """Returns `(main, argv, train) -> names` of the training runs.

  It runs a study with `train` for `fit.run`, interrupts the third training run
  by Ctrl-C, and resumes.
  """

  def start(main, argv, train):
    names = []

    def run(settings, directory):
      names.append(settings.name)
      if len(names) == 3:
        raise KeyboardInterrupt
      return train(settings, directory)

    monkeypatch.setattr(fit, "run", run)
    with pytest.raises(SystemExit, match="130"):
      main(argv)
    main(argv)
    assert names[2] == names[3]
    return names

  return start
