"""What a config takes from the Hugging Face Hub, pinned to its commits.

`commits` has a line KIND:ORG/NAME@REVISION=COMMIT for each repository. A run
fills it in when it starts and keeps it in its config.json, so that it goes on,
is evaluated and exported with the same files, whatever has become of a branch.
"""

import os
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from grpojax.data.datasets import HUB
from grpojax.models import hf
from grpojax.runtime import bucket, hub
from grpojax.runtime.config import config_error
from grpojax.training import mixtures


def _commits(config: ConfigDict) -> dict[str, str]:
  """Commits by "KIND:ORG/NAME@REVISION"."""
  return dict(line.split("=") for line in config.commits)


def _data(config: ConfigDict) -> list[tuple[str, Mapping[str, Any]]]:
  """The path and the options of each data set of the Hub."""
  data = config.data
  if mixed := mixtures.sources(config):
    each = [(one.name, one.path, one.options) for one in mixed.values()]
  else:
    each = [(data.name, data.path, data.options.to_dict())]
  return [(path, options) for name, path, options in each if name == HUB]


def _wanted(config: ConfigDict) -> dict[str, tuple[str, hub.Name]]:
  """(kind, name) of what a config may take from the Hub, by its key.

  Paths that look like names are among them.
  """
  texts = [("model", _model(config)), ("model", config.reward.model)]
  for path, options in _data(config):
    texts.append(("dataset", _with_revision(path, options.get("revision"))))
  found = [(kind, hub.parse(text)) for kind, text in texts]
  return {f"{kind}:{name}": (kind, name) for kind, name in found if name}


def _with_revision(text: str, revision: Any) -> str:
  return f"{text}@{revision}" if revision else text


def _model(config: ConfigDict) -> str:
  return _with_revision(config.model.path, config.model.revision)


def _pinned(config: ConfigDict, kind: str, text: str) -> str:
  """A name with its commit, where that is known; else as it is."""
  name = hub.parse(text)
  commit = _commits(config).get(f"{kind}:{name}")
  return f"{name.id}@{commit}" if name and commit else text


def model(config: ConfigDict) -> str:
  """What `policy.find_model` finds the config's model by."""
  return _pinned(config, "model", _model(config))


def reward_model(config: ConfigDict) -> str:
  """The same of its reward model; "" where there is none."""
  return _pinned(config, "model", config.reward.model)


def data_options(
  config: ConfigDict, name: str, path: str, options: Mapping[str, Any]
) -> dict[str, Any]:
  """A data set's options, of one of the Hub with its commit as revision.

  Args:
    config: the run's.
    name: of the data set, as `data.name`.
    path: its `data.path`.
    options: its `data.options`.
  """
  if name != HUB:
    return dict(options)
  text = _with_revision(path, options.get("revision"))
  pinned = hub.parse(_pinned(config, "dataset", text))
  known = pinned is not None and hub.is_commit(pinned.revision)
  return dict(options) | ({"revision": pinned.revision} if known else {})


def _with(config: ConfigDict, commits: Mapping[str, str]) -> ConfigDict:
  config = config.copy_and_resolve_references()
  with config.unlocked():
    lines = sorted(f"{key}={commit}" for key, commit in commits.items())
    config.commits = tuple(lines)
  return config


def with_commits(config: ConfigDict, saved: ConfigDict | None) -> ConfigDict:
  """A config with the commits that a run was started with.

  Args:
    config: the resolved config.
    saved: the run's; None where there is none yet.
  """
  if saved is None or not saved.get("commits"):
    return config
  kept = {k: c for k, c in _commits(saved).items() if k in _wanted(config)}
  return _with(config, kept | _commits(config))


def pin(config: ConfigDict) -> ConfigDict:
  """A config with the commits of all that it takes from the Hub, as of now.

  Raises:
    ValueError: the Hub does not tell; or model.revision is of a path.
  """
  commits = _commits(config)
  for key, (kind, name) in _wanted(config).items():
    is_path = kind == "model" and hf.exists(name.id)
    if key not in commits and not is_path:
      commits[key] = hub.commit(name, kind)
  path, revision = config.model.path, config.model.revision
  if revision and hf.exists(path):
    remedy = (
      f"is for models of the Hub, and there is a directory {path}: use ''"
    )
    raise ValueError(config_error("model.revision", revision, remedy))
  return config if commits == _commits(config) else _with(config, commits)


def config_errors(flat_config: Mapping[str, Any]) -> list[str]:
  """What is wrong with names of the Hub, a line each.

  Args:
    flat_config: all settings by dotted path.
  """
  errors = []
  path, revision = flat_config["model.path"], flat_config["model.revision"]
  if revision and "@" in os.fspath(path):
    remedy = f"model.path = {path!r} has one: give one of the two"
    errors.append(config_error("model.revision", revision, remedy))
  elif revision and bucket.is_url(path):
    remedy = f"is for models of the Hub, and model.path = {path!r} is a URL"
    errors.append(config_error("model.revision", revision, remedy))
  elif revision and hub.parse(f"{path}@{revision}") is None:
    remedy = (
      "a branch, a tag or a commit, with model.path = ORG/NAME of the Hub"
    )
    errors.append(config_error("model.revision", revision, remedy))
  for line in flat_config["commits"]:
    key, _, commit = str(line).partition("=")
    kind, _, name = key.partition(":")
    good = kind in hub.KINDS and hub.parse(name) and "@" in name
    if not (good and hub.is_commit(commit)):
      remedy = "lines KIND:ORG/NAME@REVISION=COMMIT; a run fills it in: use ()"
      errors.append(config_error("commits", line, remedy))
  return errors
