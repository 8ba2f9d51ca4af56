"""The steps of a training run, with the reward on the host or on the device."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.group_axis import present
from grpojax.core.grpo_step import (
  diagnosis_key,
  make_batch,
  make_grpo_step,
  rollout_metrics,
)
from grpojax.core.types import LM, Batch, Params, Prompts, Rollout, TrainState
from grpojax.core.update import make_update
from grpojax.models.transformer import last_layers
from grpojax.statistics import diagnostics
from grpojax.training import from_config, reference, scoring
from grpojax.training import policy as policies
from grpojax.training import prompts as prompts_lib
from grpojax.training.policy import Policy


def make_diagnose(config: ConfigDict, shards: int, vectorized: bool = True):
  """`(lm, params, rollout, rewards, key) -> metrics` of the gradient's error.

  It takes the first prompts of the batch whose samples all have a reward; with
  too few of them all estimates are nan.

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

  def diagnose(lm: LM, params: Params, samples: Rollout, rewards: Array, key):
    prompts = rewards.shape[0]
    # A prompt carries a tangent for every direction, so that micro-batches are
    # so many times smaller than those of training.
    parts = math.gcd(prompts, optim.minibatches * optim.micro_batches)
    trained_rows = prompts // parts
    each = shards if trained_rows % shards == 0 else 1
    most = max(trained_rows // settings.tangents, each)
    rows = max(n for n in range(each, most + 1, each) if trained_rows % n == 0)
    wanted = max(3, settings.share * prompts)
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
    return diagnostics.metrics(
      diagnostics.diagnose(projections, rewards[chosen], prompts)
    )

  return diagnose


def _mesh(places: TrainState) -> jax.sharding.Mesh:
  return jax.tree.leaves(places)[0].mesh


def make_compare(config: ConfigDict):
  """The part of a step between the rewards and the update.

  Returns:
    `(lm, params, samples, rewards, ref_params, packing=None) -> (batch,
    metrics)`, to be jitted: advantages, and log-probabilities under the
    reference.
  """
  options = from_config.update_options(config)
  rescore = from_config.rescore(config)

  def compare(lm, params, samples, rewards, ref_params, packing=None):
    on_policy = options["epochs"] * options["minibatches"] == 1
    batch = make_batch(
      lm,
      samples,
      rewards,
      from_config.advantage(config),
      ref_params,
      on_policy=on_policy,
      policy_params=params if rescore and not on_policy else None,
      kl_in_reward=from_config.kl_in_reward(config),
      micro_batches=options["minibatches"] * options["micro_batches"],
      sampling=options["sampling"],
      chunk_size=options["chunk_size"],
      packing=packing,
    )
    return batch, rollout_metrics(samples, rewards)

  return compare


def make_learn(config: ConfigDict, tx: optax.GradientTransformation):
  """The update: `(lm, state, batch) -> (state, metrics)`, to be jitted."""
  options = from_config.update_options(config)

  def learn(lm, state, batch):
    return make_update(lm, tx, **options)(state, batch)

  return learn


class Programs(NamedTuple):
  """What a step with a reward on the host compiles, each when first used.

  Attributes:
    sample: `(params, prompts, key) -> Rollout`, on the sampling mesh.
    compare: see `make_compare`.
    learn: see `make_learn`; the state is donated.
  """

  sample: Callable[..., Rollout]
  compare: Callable[..., tuple[Batch, dict[str, Array]]]
  learn: Callable[..., tuple[TrainState, dict[str, Array]]]


def make_programs(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  places: TrainState,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Programs:
  """The programs of `make_host_step`, which see for the arguments."""
  sampling = from_config.sampling(config)
  return Programs(
    from_config.sampler_program(config, policy, group_size, sampling, budgets),
    policies.jit(policy, make_compare(config)),
    policies.jit(
      policy,
      make_learn(config, tx),
      donate_argnums=1,
      out_shardings=(places, None),
    ),
  )


def _first_group(examples, texts, rewards) -> list[dict[str, Any]]:
  """The completions of the first prompt, for people to read."""
  return [
    {
      "prompt": examples[0]["prompt_text"],
      "completion": text,
      "answer": examples[0].get("answer"),
      "reward": float(value) if np.isfinite(value) else None,
    }
    for text, value in zip(texts[0], rewards[0], strict=True)
  ]


def make_host_step(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  places: TrainState,
  scorer: scoring.Scorer,
  poll: Callable[[], None],
  budgets: Callable[[Prompts], Array] | None = None,
):
  """A step whose rewards are computed on the host, from text.

  Args:
    config: the run's.
    policy: the model; the state has the parameters.
    group_size: G.
    tx: the optimizer.
    ref_params: the reference policy, or None.
    places: shardings of the state, the same before and after each step.
    scorer: of the rewards.
    poll: called between the parts of a step and all through them, but for the
      last, the update; may raise. Only that touches the state, so a step that
      it ends leaves no trace.
    budgets: see `from_config.sampler_program`.

  Returns:
    `(state, prompts, examples, diagnosed) -> (state, metrics, samples,
    failures)`. Where `diagnosed`, the metrics have those of `make_diagnose`, of
    the policy that sampled. The samples are `_first_group`'s; the failures are
    rewards that could not be computed.
  """
  programs = make_programs(config, policy, group_size, tx, places, budgets)
  mesh = _mesh(places)
  sampler = from_config.on_sampling_mesh(config, programs.sample, mesh)
  diagnose = policies.jit(
    policy,
    make_diagnose(config, mesh_lib.row_shards(mesh), policy.vmappable),
  )

  def step(state: TrainState, prompts: Prompts, examples, diagnosed: bool):
    clock = [time.perf_counter()]
    key = jax.random.fold_in(state.key, state.step)
    samples = sampler(state.params, prompts, key)
    policies.wait(samples, poll)
    clock.append(time.perf_counter())
    texts = policies.decode(policy, samples)
    scores = scoring.score(scorer, examples, texts, samples, poll)
    rewards = scores.rewards
    clock.append(time.perf_counter())
    poll()
    score_metrics = scoring.metrics(scores)
    if diagnosed:
      key = diagnosis_key(state)
      diagnosis = diagnose(state.params, samples, rewards, key)
      policies.wait(diagnosis, poll)
      score_metrics |= jax.device_get(diagnosis)
      clock.append(time.perf_counter())
      poll()
    packing = from_config.packing(config, samples, rewards, mesh)
    batch, row = programs.compare(
      state.params, samples, rewards, reference.at_hand(ref_params), packing
    )
    policies.wait(batch, poll)
    clock.append(time.perf_counter())
    state, of_update = programs.learn(state, batch)
    row = jax.device_get(row | of_update) | score_metrics
    clock.append(time.perf_counter())
    names = ["seconds_rollout", "seconds_rewards"]
    names += ["seconds_diagnosis"] * diagnosed
    names += ["seconds_reference", "seconds_update"]
    row |= dict(zip(names, np.diff(clock), strict=True))
    shown = _first_group(examples, texts, rewards)
    return state, row, shown, scores.failures

  return step


def make_device_program(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  places: TrainState,
  diagnose: Callable[..., Any] | None = None,
):
  """`(state, prompts, ref_params) -> (state, metrics)`, a step in one program.

  Args:
    config: the run's.
    policy: the model.
    group_size: G.
    tx: the optimizer.
    places: shardings of the state, which is donated.
    diagnose: from `make_diagnose`, or None.
  """
  _, reward = prompts_lib.device_reward(config, policy)

  def step(lm, state, prompts, ref_params):
    run = make_grpo_step(
      lm,
      tx,
      reward,
      group_size=group_size,
      max_new_tokens=config.sampling.max_new_tokens,
      eos_ids=policy.eos_ids,
      pad_id=policy.pad_id,
      advantage=from_config.advantage(config),
      kl_in_reward=from_config.kl_in_reward(config),
      rescore=from_config.rescore(config),
      diagnose=diagnose and functools.partial(diagnose, lm),
      decoding=from_config.decoding(config),
      **from_config.update_options(config),
    )
    return run(state, prompts, ref_params)

  return policies.jit(
    policy, step, donate_argnums=1, out_shardings=(places, None)
  )


def make_device_step(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  places: TrainState,
):
  """The same step as one XLA program, with the reward on ids.

  It returns neither samples nor failures: completions never reach the host,
  which could pack them for the reference and the update.
  """
  args = config, policy, group_size, tx, places
  plain = make_device_program(*args)
  shards = mesh_lib.row_shards(_mesh(places))
  with_diagnosis = make_device_program(
    *args, make_diagnose(config, shards, policy.vmappable)
  )

  def step(state: TrainState, prompts: Prompts, examples, diagnosed: bool):
    del examples
    run = with_diagnosis if diagnosed else plain
    state, row = run(state, prompts, reference.at_hand(ref_params))
    return state, jax.device_get(row), [], []

  return step
