"""Examples and metrics of each data set of a mixture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpojax.core import group_axis
from grpojax.data.examples import SOURCE
from grpojax.training.settings.mixtures import sources
from grpojax.training.settings.run import TrainSettings


def by_source(
  settings: TrainSettings, examples: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
  """Maps data sets to the indices of their examples; {} without a mixture."""
  rows_of: dict[str, list[int]] = {name: [] for name in sources(settings)}
  for i, example in enumerate(examples if rows_of else ()):
    rows_of[example[SOURCE]].append(i)
  return {name: np.array(rows) for name, rows in rows_of.items() if rows}


def metrics(
  settings: TrainSettings,
  examples: Sequence[Mapping[str, Any]],
  rewards: Float[np.ndarray, "B G"],
) -> dict[str, int | float]:
  """Returns a step's metrics per data set; {} without a mixture.

  The metrics are `NAME/prompts`, `NAME/reward_mean` (of finite rewards, if any)
  and `NAME/zero_variance_groups`, of rewards before reward.aggregation.
  """
  row: dict[str, int | float] = {}
  for name, rows in by_source(settings, examples).items():
    part = np.where(np.isfinite(rewards[rows]), rewards[rows], np.nan)
    row[f"{name}/prompts"] = len(rows)
    if not np.isnan(part).all():
      row[f"{name}/reward_mean"] = float(np.nanmean(part))
    equal = ~group_axis.varies(part) & (rewards.shape[-1] > 1)
    row[f"{name}/zero_variance_groups"] = float(np.mean(equal))
  return row
