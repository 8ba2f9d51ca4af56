"""Workloads of the comparison equal the numbers in the peers' scripts."""

import numpy as np
import pytest

from grpojax.benchmarks import workloads
from grpojax.training.config import from_config

TAIL = workloads.WORKLOADS["tail"]


def test_stop_table_equals_the_other_scripts():
  # NumPy's generator, as in the peers' scripts.
  table = workloads.stop_table(TAIL)
  assert table.shape == (32, 4, 8) and table.dtype == np.int32
  assert table[0, 0].tolist() == [44, 65, 2, 1, 35, 104, 43, 48]
  assert [table[i].sum() for i in (0, 1, 31)] == [2234, 1857, 2005]
  assert table.sum() == 65385 and (table == 256).sum() == 14
  assert table.max() == 256 and table.min() == 1
  np.testing.assert_array_equal(workloads.lengths(TAIL, 33), table[1])
  fixed = workloads.lengths(workloads.WORKLOADS["fixed"], 5)
  assert fixed.shape == (4, 8) and (fixed == 128).all()


def test_prompts_equal_the_other_scripts():
  ids = workloads.prompt_ids(TAIL, 2)
  assert ids.shape == (2, 4, 64)
  assert ids[0, 0, :4].tolist() == [3484, 2609, 2094, 1106]
  assert ids[1, 3, -1] == 1732
  np.testing.assert_array_equal(ids, workloads.prompt_ids(TAIL, 5)[:2])


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_configs_of_workloads(name):
  config = workloads.config_of(name)
  from_config(config)
  loss = config.loss
  optim = config.optim
  # Independent of our defaults, as peers were timed with these.
  assert (optim.name, optim.epochs, optim.minibatches) == ("adamw", 1, 1)
  assert optim.max_grad_norm == 1 and optim.weight_decay == 0
  assert loss.clip_low == loss.clip_high == 0.2
  samples = (config.batch_size, config.group_size)
  assert optim.learning_rate == 1e-6
  lengths = (config.data.max_prompt_length, config.sampling.max_new_tokens)
  assert workloads.WORKLOADS[name][:4] == samples + lengths
  kl = (0.0 if name.startswith("smollm2") else 0.04, "k3", "loss")
  assert (loss.beta, loss.kl, loss.kl_placement) == kl
