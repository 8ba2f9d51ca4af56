"""Config of a training run: defaults, command line, checks.

Config files and command lines fill an `ml_collections.ConfigDict`, which
`from_config` turns into checked `TrainSettings` for all other code.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from grpojax.core.options import Option
from grpojax.models import huggingface as hf
from grpojax.runtime.cli import command_line, config_file, configs
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.cli.settings import Section
from grpojax.training.settings import conflicts
from grpojax.training.settings.run import TrainSettings

AT_TOP = {
  "advantage": "loss.advantage",
  "subset_size": "loss.subset_size",
  "score_power": "loss.score_power",
  "logits_chunk": "optim.chunk_size",
}
"""Top-level settings of a config, with the paths of their dataclass fields."""

_TOP_FIELDS = {name: tuple(path.split(".")) for name, path in AT_TOP.items()}
_TOP_OF_FIELD = {path: name for name, path in AT_TOP.items()}

MOST_CHANGED = tuple(
  "name model.path data.name data.path data.max_prompt_length reward.functions "
  "steps batch_size group_size sampling.max_new_tokens sampling.temperature "
  "advantage loss.beta lora.rank optim.learning_rate "
  "optim.micro_batches".split()
)

LORA_RATE = 1e-5  # usual learning rate of adapters; full fine-tuning: 1e-6


def _declare_settings() -> Section:
  whole = settings_lib.section_of(TrainSettings())
  fields = dict(whole.fields)
  top = {k: x for k, x in fields.items() if not isinstance(x, Section)}
  for name, (section, key) in _TOP_FIELDS.items():
    inner = dict(fields[section].fields)
    top[name] = inner.pop(key)
    fields[section] = dataclasses.replace(fields[section], fields=inner)
  return Section("the run", top | fields, first=MOST_CHANGED)


SETTINGS = _declare_settings()
"""Declarations of all settings: defaults, texts, choices, ranges."""


def default_config() -> ConfigDict:
  """Returns the locked config with all default values."""
  return settings_lib.to_config(SETTINGS)


def default_job(name: str = "arithmetic") -> ConfigDict:
  """Returns the bundled config of this name."""
  return config_file.load_file(config_file.packaged()[name], default_config)


def parse_job(
  argv: Sequence[str],
  flags: Mapping[str, Option],
  declared: Section,
  about: str = "",
) -> tuple[ConfigDict, ConfigDict]:
  """Parses a program's command line; returns its config and its flags' values.

  Defaults come from the bundled config arithmetic.py for bundled models, else
  from own_model.py, with the learning rate `LORA_RATE` for adapters, and with a
  correction for sampling.engine.
  """
  model = command_line.typed_text(argv, "model.path")
  rank = command_line.typed_text(argv, "lora.rank")
  bundled = model is None or model in os.listdir(hf.ASSETS)
  job = default_job("arithmetic" if bundled else "own_model")
  if not bundled and rank not in (None, "0"):
    job.optim.learning_rate = LORA_RATE
  if command_line.typed_text(argv, "sampling.engine"):
    job.loss.correction = "token_truncate"
  return command_line.parse(argv, flags, declared, about, lambda: job)


def from_config(config: ConfigDict) -> TrainSettings:
  """Converts a config to settings; ValueError lists errors with remedies."""
  configs.refuse(settings_lib.key_errors(SETTINGS, config))
  tree = config.to_dict()
  errors = []
  for name, (section, key) in _TOP_FIELDS.items():
    tree[section][key] = tree.pop(name)
  try:
    settings = settings_lib.build(TrainSettings(), tree)
  except ValueError as error:
    for line in str(error).split("\n  "):
      field, text = line.split(" = ", 1)
      errors.append(f"--config.{_TOP_OF_FIELD.get(field, field)} = {text}")
  else:
    errors = conflicts.errors(settings, configs.flatten(config))
  configs.refuse(errors)
  return settings


def to_config(settings: TrainSettings) -> ConfigDict:
  """Returns the config of these settings, the inverse of `from_config`."""
  values = settings_lib.values_of(settings)
  for name, (section, key) in _TOP_FIELDS.items():
    values[name] = values[section].pop(key)
  config = default_config().unlock()
  with config.ignore_type():
    config.update(values)
  return config.lock()
