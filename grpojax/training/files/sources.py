"""Models and data of a run: their files, and their commits on the Hub.

At its start a run records `commits`, lines KIND:ORG/NAME@REVISION=COMMIT. They
are used when the run is resumed, evaluated or exported, even if a branch moved.
"""

import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.data.datasets import HUB
from grpojax.models import huggingface as hf
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.files import hub, run_storage
from grpojax.runtime.text import tokenization
from grpojax.training.files import run_directory
from grpojax.training.settings import mixtures
from grpojax.training.settings.run import TrainSettings, commits_in

# Models.


@dataclasses.dataclass(frozen=True)
class ModelFiles:
  """A model's files at one commit; config and tokenizer are read once."""

  directory: pathlib.Path  # without weights if the model is on the Hub
  name: hub.Name | None = None  # name and commit on the Hub
  ignore_keys: tuple[str, ...] = ()  # unknown keys in config.json

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    """Contents of config.json without `ignore_keys`."""
    return hf.read_config(self.directory, self.ignore_keys)

  @functools.cached_property
  def tokenizer(self) -> Any:
    """The model's transformers tokenizer."""
    return tokenization.load(self.directory)

  def with_weights(self) -> pathlib.Path:
    """Returns the directory with weights, downloaded if necessary."""
    return hub.fetch(self.name, hub.WHOLE) if self.name else self.directory


def hub_name(path: str | pathlib.Path) -> hub.Name | None:
  """Returns a name on the Hub; None for a path and for a bundled model."""
  name = hub.parse(path)
  return name if name and not hf.exists(path) else None


def fingerprint(directory: pathlib.Path) -> str:
  """Returns a text that identifies a model, from a sample of its bytes.

  A line per file has its name, size, and the CRC-32 of up to 64 blocks spread
  over it. Training changes all blocks of weights.
  """
  lines = []
  size = 2**16
  for path in filter(pathlib.Path.is_file, sorted(directory.iterdir())):
    total = path.stat().st_size
    crc = 0
    with open(path, "rb") as file:
      for start in range(0, total, max(total // 64, size)):
        file.seek(start)
        crc = zlib.crc32(file.read(size), crc)
    lines.append(f"{path.name}: {total} bytes, crc32 {crc:08x}")
  return "\n".join(lines)


def find_model(
  path: str | pathlib.Path, files: Sequence[str] = hub.WHOLE
) -> pathlib.Path:
  """Returns the directory of a model, downloaded if necessary.

  `path` is a model directory, a finished run, a .gguf file, a bundled model's
  name or, if no such path exists, ORG/NAME[@REVISION] on the Hugging Face Hub
  (only `files` are downloaded). ValueError if there is no model.
  """
  name = hub_name(path)
  copy = hub.fetch(name, files) if name else run_storage.local(path)
  with run_storage.naming(copy, str(name or path)):
    return hf.resolve(copy if name else run_directory.model_directory(copy))


def find_files(path: str, ignore_keys: Sequence[str] = ()) -> ModelFiles:
  """Finds a model (see `find_model`) without downloading its weights."""
  path = pinned(path)
  directory = find_model(path, hub.TEXTS)
  return ModelFiles(directory, hub_name(path), tuple(ignore_keys))


# Commits.


def pinned(path: str) -> str:
  """Adds the current commit to a name on the Hub; paths stay unchanged."""
  name = hub_name(path)
  return f"{name.id}@{hub.commit(name)}" if name else path


def _with_revision(text: str, revision: Any) -> str:
  return f"{text}@{revision}" if revision else text


def recorded(settings: TrainSettings, text: str, kind: str = "model") -> str:
  """Returns a Hub name with its recorded commit; other texts stay the same."""
  name = hub.parse(text)
  commit = commits_in(settings.commits).get(f"{kind}:{name}")
  return f"{name.id}@{commit}" if name and commit else text


def policy_path(settings: TrainSettings) -> str:
  """Returns model.path, with its revision or recorded commit."""
  model = settings.model
  return recorded(settings, _with_revision(model.path, model.revision))


def files_of(settings: TrainSettings, text: str | None = None) -> ModelFiles:
  """Finds a model of the settings, by default the policy, at its commit."""
  path = policy_path(settings) if text is None else recorded(settings, text)
  return find_files(path, settings.model.ignore_keys)


def data_options(
  settings: TrainSettings, name: str, path: str, options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns a data set's options, with its commit if it is on the Hub."""
  if name != HUB:
    return dict(options)
  text = _with_revision(path, options.get("revision"))
  repository = hub.parse(recorded(settings, text, "dataset"))
  known = repository is not None and hub.is_commit(repository.revision)
  return dict(options) | ({"revision": repository.revision} if known else {})


def _repositories(settings: TrainSettings) -> dict[str, tuple[str, hub.Name]]:
  """Maps "KIND:NAME" to (kind, name) for settings that look like Hub names."""
  model = settings.model
  names = [_with_revision(model.path, model.revision), model.teacher]
  texts = [("model", name) for name in (*names, settings.reward.model)]
  for source in mixtures.sources(settings).values() or [settings.data]:
    if source.name == HUB:
      revision = source.options.get("revision")
      texts.append(("dataset", _with_revision(source.path, revision)))
  parsed = [(kind, hub.parse(text)) for kind, text in texts]
  return {f"{kind}:{name}": (kind, name) for kind, name in parsed if name}


def commits_in_use(settings: TrainSettings, lines: Any) -> dict[str, str]:
  """Returns recorded commits of the repositories that the settings name."""
  repositories = _repositories(settings)
  return {k: c for k, c in commits_in(lines).items() if k in repositories}


def all_commits(settings: TrainSettings) -> dict[str, str]:
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
