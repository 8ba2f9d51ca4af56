"""Diagnosis of a step's gradient: its noise, and what a run learns from it.

The gradient is that of the policy that sampled, of all completions of a group,
each at its full weight: of the first update of a step. All tokens count alike,
as in every weighting but `sequence_mean`, which divides scores by lengths and
so has another best group size. What later updates of it
see is off-policy, and is not in these numbers; nor are corrections of a sampler
that is not the policy (`core.losses.rollout_correction`): weights w make the
scores of the theory w times as long, and truncated ones leave them a mean that
is not 0.
`is_weight*` and `rollout_effective_samples` say how far from 1 they are. The
rewards are the weighted sum of all functions, also where `reward.aggregation`
compares something else.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from grpojax.core.advantages import WITHIN_GROUPS
from grpojax.core.advantages.weighted_baselines import sample_weights
from grpojax.core.group_axis import present
from grpojax.core.objective import advantage_fn
from grpojax.core.types import LM, Params, Rollout, TrainState
from grpojax.models.transformer import last_layers
from grpojax.statistics import advantage_errors, diagnostics
from grpojax.statistics import group_size as group_size_lib
from grpojax.training.settings.run import TrainSettings


def _chosen_prompts(
  settings: TrainSettings, prompts: int, shards: int
) -> tuple[int, int, int]:
  """Number of prompts to diagnose, their micro-batches, and rows of each.

  A prompt carries a tangent for every direction, so that micro-batches are so
  many times smaller than those of training. Rows that are more than the number
  only fill the devices.
  """
  update, diagnostics_ = settings.optim.update, settings.diagnostics
  parts = math.gcd(prompts, update.minibatches * update.micro_batches)
  trained_rows = prompts // parts
  each = shards if trained_rows % shards == 0 else 1
  most = max(trained_rows // diagnostics_.tangents, each)
  rows = max(n for n in range(each, most + 1, each) if trained_rows % n == 0)
  count = math.ceil(max(3, diagnostics_.share * prompts))
  return count, min(math.ceil(count / rows), prompts // rows), rows


def make_diagnose(
  settings: TrainSettings, shards: int, vectorized: bool = True
) -> Callable[..., dict[str, Array]]:
  """Makes `(lm, params, rollout, rewards, key) -> metrics`.

  The metrics are the errors of the gradient and, where the run's baseline has
  weights (`core.advantages.weighted_baselines`), its errors with these. They
  are of `diagnostics.share` of the prompts, at least 3: the first of the batch
  whose samples all have a reward. With too few of them all estimates are nan.
  The mesh, which splits a batch into `shards` parts, does not change these.
  """
  options = {
    "tangents": settings.diagnostics.tangents,
    "chunk_size": settings.optim.update.chunk_size,
    "sampling": settings.sampling.distribution,
    "vectorized": vectorized,
  }
  if settings.diagnostics.last_layers:
    options["split"] = functools.partial(
      last_layers, count=settings.diagnostics.last_layers
    )

  def diagnose(
    lm: LM,
    params: Params,
    rollout: Rollout,
    rewards: Array,
    key,
  ):
    prompts = rewards.shape[0]
    count, parts, rows = _chosen_prompts(settings, prompts, shards)
    missing = ~jnp.all(present(rewards), axis=-1)
    chosen = jnp.argsort(missing, stable=True)[: parts * rows]
    projections = diagnostics.score_projections(
      lm,
      params,
      jax.tree.map(lambda x: x[chosen], rollout),
      key,
      micro_batches=parts,
      **options,
    )
    # Rows that only fill the devices would make the estimates better, and the
    # group size that they choose another one on another mesh.
    projections, chosen = projections[:, :count], chosen[:count]
    rollout, rewards = jax.tree.map(lambda x: x[chosen], (rollout, rewards))
    row = diagnostics.metrics(
      diagnostics.diagnose(projections, rewards, prompts)
    )
    advantage = advantage_fn(settings.loss)
    weights = sample_weights(advantage, rollout)
    # Elsewhere an advantage depends on other groups, or on the token.
    within = settings.loss.advantage in WITHIN_GROUPS
    if weights and within and "token_score_sq" not in weights:
      errors = advantage_errors.advantage_errors(
        projections, rewards, advantage, weights
      )
      row |= advantage_errors.metrics(errors, row["c1"], prompts)
    return row

  return diagnose


def make_update_group_size(settings: TrainSettings, shardings: TrainState):
  """Makes `(state, metrics) -> state`, after a step with a diagnosis.

  The state learns the group size if that is chosen while training.
  """
  auto = settings.auto_group_size
  observe_size = jax.jit(
    functools.partial(
      group_size_lib.observe,
      smallest=auto.smallest,
      largest=auto.largest,
      decay=auto.decay,
      margin=auto.margin,
      confidence=auto.confidence,
    ),
    out_shardings=shardings.group_size,
  )

  def update_group_size(state: TrainState, row: Mapping[str, Any]):
    old = state.group_size
    if old is not None:
      new = observe_size(old, row["c1"], row["c1_se"], row["c3"], row["c3_se"])
      sizes = int(old.group_size), int(new.group_size)
      if sizes[0] != sizes[1]:
        print(f"group size {sizes[0]} -> {sizes[1]}", flush=True)
      state = state.replace(group_size=new)
    return state

  return update_group_size
