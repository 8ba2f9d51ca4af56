"""The configuration of a training run: the default, and what makes one valid.

A config is read here, in the rest of `grpojax.training`, in the programs and in
the studies, and nowhere below them: what these call takes plain arguments. What
its settings are stands in `grpojax.training.settings`.
"""

from ml_collections import ConfigDict

from grpojax.runtime import config as config_lib
from grpojax.runtime import config_file
from grpojax.runtime import settings as settings_lib
from grpojax.training import validation
from grpojax.training.settings import SETTINGS

WORDS = settings_lib.words(SETTINGS)
"""Words that may stand in the place of a number."""


def default_config() -> ConfigDict:
  """What every config starts from. Locked: an unknown key is an error."""
  return settings_lib.to_config(SETTINGS)


def default_job() -> ConfigDict:
  """The config of a program that is given none: configs/arithmetic.py."""
  file = config_file.packaged()["arithmetic"]
  return config_file.load_file(file, default_config)


def validate(config: ConfigDict) -> None:
  """Checks a whole training config before anything compiles.

  Raises:
    ValueError: with every error, a line each: field, value, what to do.
  """
  wrong_keys = config_lib.check_keys(config, default_config(), WORDS)
  config_lib.refuse(
    wrong_keys or validation.config_errors(config_lib.flatten(config))
  )
