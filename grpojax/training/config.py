"""Entrance of a training run's config: defaults, checks, and typed values.

Config files and command lines have an `ml_collections.ConfigDict`, from which
`from_config` makes checked `TrainSettings` for all other code.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from grpojax.core.options import Option
from grpojax.models import huggingface as hf
from grpojax.runtime.cli import command_line, config_file
from grpojax.runtime.cli import config as config_lib
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
"""Settings that stand at the top of a config, and the field of each."""

_TOP_OF_FIELD = {field: name for name, field in AT_TOP.items()}

MOST_CHANGED = (
  "name",
  "model.path",
  "data.name",
  "data.path",
  "data.max_prompt_length",
  "reward.functions",
  "steps",
  "batch_size",
  "group_size",
  "sampling.max_new_tokens",
  "sampling.temperature",
  "advantage",
  "loss.beta",
  "lora.rank",
  "optim.learning_rate",
  "optim.micro_batches",
)


LORA_RATE = 1e-5  # usual rate of adapters, 10 times that of full fine-tuning


def _declared() -> Section:
  whole = settings_lib.section_of(TrainSettings())
  fields = dict(whole.fields)
  top = {k: x for k, x in fields.items() if not isinstance(x, Section)}
  for name, path in AT_TOP.items():
    section, key = path.split(".")
    inner = dict(fields[section].fields)
    top[name] = inner.pop(key)
    fields[section] = dataclasses.replace(fields[section], fields=inner)
  return Section("the run", top | fields, first=MOST_CHANGED)


SETTINGS = _declared()
"""Declarations of all settings: defaults, texts, choices, ranges."""

CHOICES = {
  name: tuple(one.choices)
  for name, one in settings_lib.flat_settings(SETTINGS)
  if one.choices
}
"""Names that some settings choose from, by the dotted path of the setting."""


def default_config() -> ConfigDict:
  """Returns the config that every other one starts from, locked."""
  return settings_lib.to_config(SETTINGS)


def default_job(name: str = "arithmetic") -> ConfigDict:
  """Returns the config of a program that is given none."""
  return config_file.load_file(config_file.packaged()[name], default_config)


def parse_job(
  argv: Sequence[str],
  flags: Mapping[str, Option],
  declared: Section,
  about: str = "",
) -> tuple[ConfigDict, ConfigDict]:
  """Reads the command line of a program whose --config is a whole job.

  Without --config it is arithmetic.py, or own_model.py for another model, which
  the learning rate of an embedded one would ruin. Adapters start from 10 times
  the learning rate. Arguments and result are those of `command_line.parse`.
  """
  job = default_job()
  parse = functools.partial(
    command_line.parse, argv, flags, declared, about, lambda: job
  )
  config, values = parse()
  if config.model.path not in os.listdir(hf.ASSETS):
    job = default_job("own_model")
    if config.lora.rank:
      job.optim.learning_rate = LORA_RATE
    config, values = parse()
  return config, values


def from_config(config: ConfigDict) -> TrainSettings:
  """Returns a config's settings, checked before anything compiles.

  The ValueError has a line for every error: setting, value, what to do.
  """
  config_lib.refuse(settings_lib.key_errors(SETTINGS, config))
  tree, errors = config.to_dict(), []
  for name, path in AT_TOP.items():
    section, key = path.split(".")
    tree[section][key] = tree.pop(name)
  try:
    settings = settings_lib.build(TrainSettings(), tree)
  except ValueError as error:
    for line in str(error).split("\n  "):
      field, rest = line.split(" = ", 1)
      errors.append(f"--config.{_TOP_OF_FIELD.get(field, field)} = {rest}")
  else:
    errors = conflicts.errors(settings, config_lib.flatten(config))
  config_lib.refuse(errors)
  return settings


def to_config(settings: TrainSettings) -> ConfigDict:
  """Returns the config that `from_config` makes such settings of."""
  values = settings_lib.values_of(settings)
  for name, path in AT_TOP.items():
    section, key = path.split(".")
    values[name] = values[section].pop(key)
  config = default_config().unlock()
  with config.ignore_type():
    config.update(values)
  return config.lock()
