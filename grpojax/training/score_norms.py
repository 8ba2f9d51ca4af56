"""What a run knows of its scores' lengths, for the advantage `norm_ratio`.

It is learned from the diagnoses, used from the next step on, and in every
checkpoint (`TrainState.score_norms`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Real
from ml_collections import ConfigDict

from grpojax.core.advantages import ADVANTAGES
from grpojax.core.binding import asks_for
from grpojax.core.weighted_baselines import (
  ScoreNorms,
  init_score_norms,
  observe_score_norms,
  score_norm_sums,
)
from grpojax.runtime.config import config_error

_COLUMN = "score_norms_{}"  # of a diagnosis' metrics


def wanted(advantage: str) -> bool:
  """Whether the advantage of this name asks for them; False for no name."""
  known = advantage in ADVANTAGES
  return known and asks_for(ADVANTAGES[advantage], "score_norms")


def config_errors(flat_config: Mapping[str, Any]) -> list[str]:
  """What is missing to know them, a line each.

  Args:
    flat_config: all settings by dotted path.
  """
  name, every = flat_config["advantage"], flat_config["diagnostics.every"]
  if every or not wanted(name):
    return []
  remedy = (
    f"advantage = {name!r} knows the scores' lengths from the diagnostics: "
    "give 1 or more"
  )
  return [config_error("diagnostics.every", every, remedy)]


def first(config: ConfigDict) -> ScoreNorms | None:
  """Before the first step; None where nobody asks for them."""
  return init_score_norms() if wanted(config.advantage) else None


def observe(config: ConfigDict) -> Callable[..., ScoreNorms]:
  """`(norms, sums) -> norms`, after one more diagnosis."""
  return functools.partial(observe_score_norms, decay=config.score_norms.decay)


def to_row(
  projections: Float[Array, "V B G"], rewards: Real[Array, "B G"]
) -> dict[str, Float[Array, ""]]:
  """The sums of a diagnosis, as metrics.

  Args:
    projections: of `score_projections`.
    rewards: of these samples.
  """
  sums = score_norm_sums(jnp.mean(projections**2, axis=0), rewards)
  return {_COLUMN.format(name): x for name, x in vars(sums).items()}


def from_row(row: Mapping[str, Any]) -> ScoreNorms:
  """The sums from a step's metrics."""
  names = ScoreNorms.__dataclass_fields__
  return ScoreNorms(**{n: row[_COLUMN.format(n)] for n in names})
