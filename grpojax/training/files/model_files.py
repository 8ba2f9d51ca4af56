"""Files of a model: a directory, a finished run, a .gguf file or the Hub."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from grpojax.models import huggingface as hf
from grpojax.runtime.files import hub, run_storage
from grpojax.runtime.text import tokenization
from grpojax.training.files import hub_pins, run_directory
from grpojax.training.settings.run import TrainSettings


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


def hub_name(path: str | pathlib.Path) -> hub.Name | None:
  """Returns a name on the Hub; None for a path and for a bundled model."""
  name = hub.parse(path)
  return name if name and not hf.exists(path) else None


def pinned(path: str) -> str:
  """Adds the current commit to a name on the Hub; paths stay unchanged."""
  name = hub_name(path)
  return f"{name.id}@{hub.commit(name)}" if name else path


def find_files(path: str, ignore_keys: Sequence[str] = ()) -> ModelFiles:
  """Finds a model (see `find_model`) without downloading its weights."""
  path = pinned(path)
  directory = find_model(path, hub.TEXTS)
  return ModelFiles(directory, hub_name(path), tuple(ignore_keys))


def files_of(settings: TrainSettings, path: str) -> ModelFiles:
  """Finds a model of the settings at its recorded commit."""
  path = hub_pins.pinned(settings, path)
  return find_files(path, settings.model.ignore_keys)


def policy_files(settings: TrainSettings) -> ModelFiles:
  """Finds the model of model.path at its recorded commit."""
  return find_files(hub_pins.model(settings), settings.model.ignore_keys)
