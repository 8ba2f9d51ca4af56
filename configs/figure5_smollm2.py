"""Figure 5 of arXiv 2603.01162 for SmolLM2-135M on sums in words, N = 32.

Command:   python -m grpojax.studies.group_size \
               --config=configs/figure5_smollm2.py
           with the packages of configs/smollm2.py, on the same task.
Hardware:  two CPU cores, 6 GB of memory, 30 GB of disk.
Time:      15 runs of 16 steps; 13 to 20 seconds per step on two cores.
Expected:  no clear best size: two seeds of the same size differ by 40 points of
           accuracy. Results: grpojax/studies/README.md.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

from grpojax.runtime.cli.settings import to_config
from grpojax.studies import group_size

TRAIN = pathlib.Path(__file__).with_name("smollm2.py")


def get_config() -> ConfigDict:
  config = to_config(group_size.SETTINGS)
  config.name = "figure5_smollm2"
  config.budgets = (32,)
  config.group_sizes = (4, 8, 16, 32)
  config.predict.prompts = 32
  config.predict.group_size = 8
  config.predict.tangents = 4
  config.predict.batch = 8
  train = config.train = runpy.run_path(str(TRAIN))["get_config"]().unlock()
  train.steps = 16
  train.eval.every = 8
  train.eval.num_prompts = 64
  train.checkpoint.every = 16
  train.log.trackers = ()
  train.auto_group_size.start = 8  # 16 leaves 2 prompts; a diagnosis needs 3
  train.auto_group_size.largest = 8
  train.diagnostics.every = 4
  train.diagnostics.share = 1.0
  return config
