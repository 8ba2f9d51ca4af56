"""Repositories of the Hugging Face Hub, pinned to their commits.

When a run starts it fills in `commits`, lines KIND:ORG/NAME@REVISION=COMMIT.
It is resumed, evaluated and exported with these even if a branch moves.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpojax.data.datasets import HUB
from grpojax.models import huggingface as hf
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.files import hub
from grpojax.training.data import mixtures
from grpojax.training.run import run_storage
from grpojax.training.settings.run import TrainSettings


def _commits(lines: Any) -> dict[str, str]:
  """Commits by "KIND:ORG/NAME@REVISION"; `lines` of a file may be damaged."""
  if not isinstance(lines, (list, tuple)):
    return {}
  pairs = [line.split("=") for line in lines if isinstance(line, str)]
  return dict(pair for pair in pairs if len(pair) == 2)


def _wanted(settings: TrainSettings) -> dict[str, tuple[str, hub.Name]]:
  """(kind, name) of Hub names, and of paths like them, by "KIND:NAME"."""
  texts = [("model", _model(settings)), ("model", settings.model.teacher)]
  texts.append(("model", settings.reward.model))
  for source in mixtures.sources(settings).values() or [settings.data]:
    if source.name == HUB:
      revision = source.options.get("revision")
      texts.append(("dataset", _with_revision(source.path, revision)))
  names = [(kind, hub.parse(text)) for kind, text in texts]
  return {f"{kind}:{name}": (kind, name) for kind, name in names if name}


def _with_revision(text: str, revision: Any) -> str:
  return f"{text}@{revision}" if revision else text


def _model(settings: TrainSettings) -> str:
  return _with_revision(settings.model.path, settings.model.revision)


def _pinned(settings: TrainSettings, kind: str, text: str) -> str:
  """Returns a name with its commit if it is known, else the name as it is."""
  name = hub.parse(text)
  commit = _commits(settings.commits).get(f"{kind}:{name}")
  return f"{name.id}@{commit}" if name and commit else text


def model(settings: TrainSettings) -> str:
  """Returns the name or path by which `policy.find_model` finds the model."""
  return _pinned(settings, "model", _model(settings))


def teacher(settings: TrainSettings) -> str:
  """Returns the name or path of the teacher; "" without one."""
  return _pinned(settings, "model", settings.model.teacher)


def reward_model(settings: TrainSettings) -> str:
  """Returns the name or path of the reward model; "" without one."""
  return _pinned(settings, "model", settings.reward.model)


def data_options(
  settings: TrainSettings, name: str, path: str, options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns `data.options`, of a data set of the Hub with its commit."""
  if name != HUB:
    return dict(options)
  text = _with_revision(path, options.get("revision"))
  pinned = hub.parse(_pinned(settings, "dataset", text))
  known = pinned is not None and hub.is_commit(pinned.revision)
  return dict(options) | ({"revision": pinned.revision} if known else {})


def _with(settings: TrainSettings, commits: Mapping[str, str]) -> TrainSettings:
  """Adds commits; those of the settings come first."""
  commits = {**commits, **_commits(settings.commits)}
  lines = sorted(f"{key}={commit}" for key, commit in commits.items())
  return dataclasses.replace(settings, commits=tuple(lines))


def with_commits(
  settings: TrainSettings, commits: Sequence[str]
) -> TrainSettings:
  """Adds the commits that a run was started with, if they are still needed."""
  if not commits:
    return settings
  repositories = _wanted(settings)
  pinned = {k: c for k, c in _commits(commits).items() if k in repositories}
  return _with(settings, pinned)


def pin(settings: TrainSettings) -> TrainSettings:
  """Adds the present commits of all that is taken from the Hub.

  ValueError if the Hub does not answer, or if model.revision is of a path.
  """
  before, commits = _commits(settings.commits), {}
  for key, (kind, name) in _wanted(settings).items():
    is_path = kind == "model" and hf.exists(name.id)
    if key not in before and not is_path:
      commits[key] = hub.commit(name, kind)
  path, revision = settings.model.path, settings.model.revision
  if revision and hf.exists(path):
    remedy = (
      f"is for models of the Hub, and there is a directory {path}: use ''"
    )
    raise ValueError(config_error("model.revision", revision, remedy))
  return _with(settings, commits) if commits else settings


def conflicts(settings: TrainSettings) -> Iterator[tuple[str, str]]:
  """Yields settings with names of the Hub that cannot be, and what to do."""
  path, revision = settings.model.path, settings.model.revision
  remedy = ""
  if revision and "@" in path:
    remedy = f"model.path = {path!r} has one: give one of the two"
  elif revision and run_storage.is_url(path):
    remedy = f"is for models of the Hub, and model.path = {path!r} is a URL"
  elif revision and hub.parse(f"{path}@{revision}") is None:
    remedy = (
      "a branch, a tag or a commit, with model.path = ORG/NAME of the Hub"
    )
  if remedy:
    yield "model.revision", remedy
  for line in settings.commits:
    key, _, commit = str(line).partition("=")
    kind, _, name = key.partition(":")
    good = kind in hub.KINDS and hub.parse(name) and "@" in name
    if not (good and hub.is_commit(commit)):
      remedy = "lines KIND:ORG/NAME@REVISION=COMMIT; a run fills it in: use ()"
      yield "commits", remedy
