"""How far off a step's gradient is, from a few of its prompts; a run's too.

The gradient is that of the policy that sampled, of all completions of a group,
each at its full weight: of the first update of a step. What later updates of it
see is off-policy, and is not in these numbers; nor are corrections of a sampler
that is not the policy (`core.rollout_correction`): weights w make the scores of
the theory w times as long, and truncated ones leave them a mean that is not 0.
`importance_*` and `rollout_effective_samples` say how far from 1 they are. The
rewards are the weighted sum of all functions, also where `reward.aggregation`
compares something else.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from ml_collections import ConfigDict

from grpojax.core.group_axis import present
from grpojax.core.types import LM, Params, Rollout
from grpojax.core.weighted_baselines import (
  ScoreNorms,
  bind_norms,
  sample_weights,
)
from grpojax.models.transformer import last_layers
from grpojax.statistics import advantage_errors, diagnostics
from grpojax.statistics.group_size_interval import pooled_group_size
from grpojax.training import from_config
from grpojax.training import score_norms as norms_lib

_BOUNDS = ("optimal_group_size_low", "optimal_group_size_high")


def make_diagnose(config: ConfigDict, shards: int, vectorized: bool = True):
  """`(lm, params, rollout, rewards, key, score_norms=None) -> metrics`.

  They say how far off the gradient is and, where the run's baseline has weights
  (`core.weighted_baselines`), how far off with these.

  It takes `diagnostics.share` of the prompts, at least 3: the first of the
  batch whose samples all have a reward. With too few of them all estimates are
  nan. Which prompts these are does not depend on how the work is cut.

  Args:
    config: the run's; `diagnostics` and how training cuts its batches.
    shards: parts that the mesh cuts a batch into; each keeps a prompt of every
      micro-batch.
    vectorized: see `projections.score_projections`.
  """
  settings, optim = config.diagnostics, config.optim
  options = {"sampling": from_config.sampling(config), "vectorized": vectorized}
  if settings.last_layers:
    options["split"] = functools.partial(
      last_layers, count=settings.last_layers
    )

  def diagnose(
    lm: LM,
    params: Params,
    samples: Rollout,
    rewards: Array,
    key,
    score_norms: ScoreNorms | None = None,
  ):
    prompts = rewards.shape[0]
    # A prompt carries a tangent for every direction, so that micro-batches are
    # so many times smaller than those of training.
    parts = math.gcd(prompts, optim.minibatches * optim.micro_batches)
    trained_rows = prompts // parts
    each = shards if trained_rows % shards == 0 else 1
    most = max(trained_rows // settings.tangents, each)
    rows = max(n for n in range(each, most + 1, each) if trained_rows % n == 0)
    wanted = math.ceil(max(3, settings.share * prompts))
    parts = min(math.ceil(wanted / rows), prompts // rows)
    missing = ~jnp.all(present(rewards), axis=-1)
    chosen = jnp.argsort(missing, stable=True)[: parts * rows]
    projections = diagnostics.score_projections(
      lm,
      params,
      jax.tree.map(lambda x: x[chosen], samples),
      key,
      tangents=settings.tangents,
      micro_batches=parts,
      chunk_size=config.logits_chunk,
      **options,
    )
    # What is more only fills the devices. It would make the estimates better,
    # and the group size that they choose another one on another mesh.
    projections, chosen = projections[:, :wanted], chosen[:wanted]
    some, rewards = jax.tree.map(lambda x: x[chosen], (samples, rewards))
    row = diagnostics.metrics(
      diagnostics.diagnose(projections, rewards, prompts)
    )
    advantage = from_config.advantage(config)
    weights = sample_weights(advantage, some)
    if norms_lib.wanted(config.advantage):
      row |= norms_lib.to_row(projections, rewards)
    if weights or norms_lib.wanted(config.advantage):
      errors = advantage_errors.advantage_errors(
        projections, rewards, bind_norms(advantage, score_norms), weights
      )
      row |= advantage_errors.metrics(errors, row["c1"], prompts)
    return row

  return diagnose


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """The group size that the gradient's noise asked for, over a run.

  Args:
    rows: of its metrics, some of them with a diagnosis.

  Returns:
    `optimal_group_size` and `optimal_group_size_interval` (95%, over the
    diagnoses; of a single one, its own), for summary.json; nothing without
    diagnoses.
  """
  rows = [row for row in rows if "c1" in row]
  found = [(row["c1"], row["c3"]) for row in rows]
  c1, c3 = np.array(found, float).reshape(-1, 2).T  # null becomes nan
  if not np.isfinite(c1 + c3).any():
    return {}
  own = [  # an infinite bound is null
    [math.inf if x is None else x for x in map(row.get, _BOUNDS)]
    for row in rows
  ]
  best, *interval = pooled_group_size(c1, c3, np.array(own, float))
  return {
    "optimal_group_size": best,
    "optimal_group_size_interval": interval,
  }


def line(summary: Mapping[str, Any]) -> str:
  """What `summary` found, to print; infinite bounds are null in a file."""
  best, (low, high) = (
    summary[f"optimal_group_size{end}"] for end in ("", "_interval")
  )
  sizes = best, low, high
  said = "{} [{}, {}]".format(
    *("inf" if x is None else f"{x:.1f}" for x in sizes)
  )
  if low == 1 and high in (None, math.inf):
    return f"the gradient's noise left the best group size open: {said}"
  return f"the gradient's noise asked for groups of {said}"
