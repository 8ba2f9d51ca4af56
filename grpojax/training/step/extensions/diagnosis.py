"""Noise of a step's gradient.

The diagnosis is about the step's first update, with equal weights of all
completions and of all tokens. (The weighting `sequence_mean` divides scores by
lengths, so its best group size differs.) Rewards are the weighted sum of all
functions, whatever `reward.aggregation` is. The diagnosis ignores

- later updates of the step, which are off-policy;
- weights that correct for a sampler unlike the policy
  (`core.losses.rollout_correction`). A weight w scales a score by w, and
  truncated weights give scores a nonzero mean: see the metrics `is_weight*` and
  `rollout_effective_samples`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from grpojax.core import meshes
from grpojax.core.advantages import WITHIN_GROUPS
from grpojax.core.advantages.weighted_baselines import sample_weights
from grpojax.core.group_axis import present
from grpojax.core.objective import advantage_fn
from grpojax.core.step import diagnosis_key
from grpojax.core.types import LM, Params, Rollout
from grpojax.models.transformer import last_layers
from grpojax.statistics import advantage_errors, diagnostics
from grpojax.training import policies
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.extension import Extension, Inputs, with_metrics

NAME = "diagnosis"


def _chosen_prompts(
  settings: TrainSettings, prompts: int, shards: int
) -> tuple[int, int, int]:
  """Returns counts: diagnosed prompts, micro-batches, rows per micro-batch.

  Each row carries `diagnostics.tangents` tangents, so a micro-batch has fewer
  rows than in training by that factor. Rows beyond the prompts are padding.
  """
  update = settings.optim.update
  options = settings.diagnostics
  parts = math.gcd(prompts, update.minibatches * update.micro_batches)
  trained_rows = prompts // parts
  # Rows are divisible by the mesh's shards if the rows of training are.
  each = shards if trained_rows % shards == 0 else 1
  most = max(trained_rows // options.tangents, each)
  # The largest divisor of the training's rows up to `most`.
  rows = max(n for n in range(each, most + 1, each) if trained_rows % n == 0)
  count = math.ceil(max(3, options.share * prompts))
  return count, min(math.ceil(count / rows), prompts // rows), rows


def make_diagnose(
  settings: TrainSettings, shards: int, vectorized: bool = True
) -> Callable[..., dict[str, Array]]:
  """Returns a function that estimates the error of a step's gradient.

  It is `(lm, params, rollout, rewards, key) -> metrics`, with further metrics
  for weighted baselines (`core.advantages.weighted_baselines`). It uses the
  first prompts with a reward for every sample: `diagnostics.share` of all, but
  at least 3. Metrics are NaN for too few prompts, and independent of `shards`.
  """
  options = {
    "tangents": settings.diagnostics.tangents,
    "chunk_size": settings.optim.update.chunk_size,
    "sampling": settings.sampling.distribution,
    "vectorized": vectorized,
  }
  if layers := settings.diagnostics.last_layers:
    options["split"] = functools.partial(last_layers, count=layers)

  def diagnose(lm: LM, params: Params, rollout: Rollout, rewards: Array, key):
    prompts = rewards.shape[0]
    count, parts, rows = _chosen_prompts(settings, prompts, shards)
    missing = ~jnp.all(present(rewards), axis=-1)
    # A stable sort moves complete groups to the front, in their order.
    chosen = jnp.argsort(missing, stable=True)[: parts * rows]
    projections = diagnostics.score_projections(
      lm,
      params,
      jax.tree.map(lambda x: x[chosen], rollout),
      key,
      micro_batches=parts,
      **options,
    )
    # Drop padding rows: they depend on the mesh, and the group size must not.
    projections = projections[:, :count]
    chosen = chosen[:count]
    rollout, rewards = jax.tree.map(lambda x: x[chosen], (rollout, rewards))
    diagnosis = diagnostics.diagnose(projections, rewards, prompts)
    row = diagnostics.metrics(diagnosis)
    advantage = advantage_fn(settings.loss)
    weights = sample_weights(advantage, rollout)
    # The error estimate needs a baseline per group, not per token.
    within = settings.loss.advantage in WITHIN_GROUPS
    if weights and within and "token_score_sq" not in weights:
      errors = advantage_errors.advantage_errors(
        projections, rewards, advantage, weights
      )
      row |= advantage_errors.metrics(errors, row["c1"], prompts)
    return row

  return diagnose


def is_due(settings: TrainSettings, number: int) -> bool:
  """Returns True if step `number` has a diagnosis.

  Step 1 compiles enough, so the first diagnosis is that of step 2. With
  sampling.ahead the last step samples nothing to diagnose.
  """
  every = settings.diagnostics.every
  ends = settings.sampling.ahead and number == settings.steps
  return every > 0 and number > 1 and (number - 2) % every == 0 and not ends


def extension(inputs: Inputs) -> Extension | None:
  """Diagnoses the first samples of a step; None if it is off."""
  settings = inputs.settings
  if not settings.diagnostics.every or settings.reward.on_device:
    return None
  shards = meshes.row_shards(inputs.mesh)
  policy = inputs.policy
  program = make_diagnose(settings, shards, policy.vmappable)
  diagnose_draw = policies.jit(policy, program)

  def after_draw(state, drawn, context):
    if not is_due(settings, context.number):
      return drawn
    # With sampling.ahead only the next step's samples are on-policy.
    upcoming = context.upcoming
    on_policy = drawn.batch if upcoming is None else upcoming.collect()
    values = on_policy.rewards.rewards
    unknown = {}
    if values.dtype != np.float32:
      # float32 would lose differences, so subtract the mean of all prompts; the
      # diagnosis compares prompts, so they must have the same offset.
      values = (values - np.nanmean(values)).astype(np.float32)
      # `vanilla` has no baseline, so its error depends on the offset.
      unknown = {"gradient_mse_vanilla": np.nan}
    placed = meshes.place(values, inputs.mesh, "batch", "group")
    metrics = diagnose_draw(
      state.params, on_policy.rollout, placed, diagnosis_key(state)
    )
    policies.wait(metrics, inputs.check_signals)
    context.timer("diagnosis")
    return with_metrics(drawn, meshes.fetch(metrics) | unknown)

  return Extension(after_draw=after_draw)
