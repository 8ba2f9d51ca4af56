"""Commits of a run's repositories on the Hugging Face Hub.

At its start a run records `commits`, lines KIND:ORG/NAME@REVISION=COMMIT. They
are used when the run is resumed, evaluated or exported, even if a branch moved.
"""

from collections.abc import Mapping
from typing import Any

from grpojax.data.datasets import HUB
from grpojax.models import huggingface as hf
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.files import hub
from grpojax.training.settings import mixtures
from grpojax.training.settings.facts import commits_in
from grpojax.training.settings.run import TrainSettings


def _repositories(settings: TrainSettings) -> dict[str, tuple[str, hub.Name]]:
  """Maps "KIND:NAME" to (kind, name) for settings that look like Hub names."""
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


def pinned(settings: TrainSettings, text: str, kind: str = "model") -> str:
  """Returns a Hub name with its recorded commit; other texts stay the same."""
  name = hub.parse(text)
  commit = commits_in(settings.commits).get(f"{kind}:{name}")
  return f"{name.id}@{commit}" if name and commit else text


def model(settings: TrainSettings) -> str:
  """Returns the model's path or pinned Hub name, for `find_model`."""
  return pinned(settings, _model(settings))


def data_options(
  settings: TrainSettings, name: str, path: str, options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns a data set's options, with its commit if it is on the Hub."""
  if name != HUB:
    return dict(options)
  text = _with_revision(path, options.get("revision"))
  repository = hub.parse(pinned(settings, text, "dataset"))
  known = repository is not None and hub.is_commit(repository.revision)
  return dict(options) | ({"revision": repository.revision} if known else {})


def in_use(settings: TrainSettings, lines: Any) -> dict[str, str]:
  """Returns recorded commits of the repositories that the settings name."""
  repositories = _repositories(settings)
  return {k: c for k, c in commits_in(lines).items() if k in repositories}


def pin(settings: TrainSettings) -> dict[str, str]:
  """Returns the settings' commits and the current ones of other repositories.

  ValueError if the Hub does not answer, or if a local model has a revision.
  """
  commits = commits_in(settings.commits)
  for key, (kind, name) in _repositories(settings).items():
    is_path = kind == "model" and hf.exists(name.id)
    # Recorded commits stay, even if the branch has moved.
    if key not in commits and not is_path:
      commits[key] = hub.commit(name, kind)
  path = settings.model.path
  revision = settings.model.revision
  if revision and hf.exists(path):
    remedy = f"is for models on the Hub, but {path} is a directory: use ''"
    raise ValueError(config_error("model.revision", revision, remedy))
  return commits
