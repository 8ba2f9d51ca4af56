"""GRPO on the embedded arithmetic model: the default run.

Command:   python -m grpojax.train --config=configs/arithmetic.py
Hardware:  two CPU cores, no accelerator.
Time:      TODO seconds of training.
Expected:  held-out accuracy (greedy) from TODO to TODO.
"""

from ml_collections import ConfigDict

from grpojax.runtime.config import default_config


def get_config() -> ConfigDict:
  return default_config()
