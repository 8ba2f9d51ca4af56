"""The steps of a training run, with the reward on the host or on the device."""

import functools
import math
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from jaxtyping import Array
from ml_collections import ConfigDict

from grpojax import experiment
from grpojax.core import diagnostics
from grpojax.core.step import (
  diagnosis_key,
  make_batch,
  make_grpo_step,
  rollout_metrics,
)
from grpojax.core.types import Params, Prompts, Rollout, TrainState
from grpojax.core.update import make_update
from grpojax.models.transformer import last_layers
from grpojax.runtime import sharding


def make_diagnose(config: ConfigDict, policy: experiment.Policy, shards: int):
  """`(params, rollout, rewards, key) -> metrics` of the gradient's error.

  It takes the first prompts of the batch. Each carries a tangent for every
  direction, so micro-batches have fewer prompts than those of training, as long
  as each of the `shards` that a batch is cut into has one.
  """
  settings, optim = config.diagnostics, config.optim
  options = {"sampling": experiment.sampling(config)}
  if settings.last_layers:
    options["split"] = functools.partial(
      last_layers, count=settings.last_layers
    )

  def diagnose(params: Params, samples: Rollout, rewards: Array, key):
    prompts = rewards.shape[0]
    all_rows = prompts // (optim.minibatches * optim.micro_batches)
    most = max(all_rows // settings.tangents, shards)
    rows = max(n for n in range(shards, most + 1, shards) if all_rows % n == 0)
    wanted = max(3, settings.share * prompts)
    parts = min(math.ceil(wanted / rows), prompts // rows)
    count = parts * rows
    projections = diagnostics.score_projections(
      policy.lm,
      params,
      jax.tree.map(lambda x: x[:count], samples),
      key,
      tangents=settings.tangents,
      micro_batches=parts,
      chunk_size=config.logits_chunk,
      **options,
    )
    return diagnostics.metrics(
      diagnostics.diagnose(projections, rewards[:count], prompts)
    )

  return diagnose


def _shards(places: TrainState) -> int:
  return sharding.row_shards(jax.tree.leaves(places)[0].mesh)


def make_host_step(
  config: ConfigDict,
  policy: experiment.Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  places: TrainState,
  poll: Callable[[], None],
):
  """A step whose rewards are computed on the host, from text.

  Args:
    config: the run's.
    policy: the model; the state has the parameters.
    group_size: G.
    tx: the optimizer.
    ref_params: the reference policy, or None.
    places: shardings of the state, the same before and after each step.
    poll: called between the parts of a step; may raise. Only the last part
      touches the state, so a step that it ends leaves no trace.

  Returns:
    `(state, prompts, examples, diagnosed) -> (state, metrics, samples)`. Where
    `diagnosed`, the metrics have those of `make_diagnose`, of the policy that
    sampled. The samples are those of the first prompt, for people to read.
  """
  options = experiment.update_options(config)
  sampler = experiment.make_sampler(
    config, policy, group_size, options["sampling"]
  )
  update = make_update(policy.lm, tx, **options)
  reward = experiment.host_reward(config)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
  def learn(state, samples, rewards, ref_params):
    batch = make_batch(
      policy.lm,
      samples,
      rewards,
      experiment.advantage(config),
      ref_params,
      on_policy=options["epochs"] * options["minibatches"] == 1,
      kl_in_reward=experiment.kl_in_reward(config),
      sampling=options["sampling"],
      chunk_size=options["chunk_size"],
    )
    state, row = update(state, batch)
    return state, rollout_metrics(samples, rewards) | row

  # Compiled when first used.
  diagnose = jax.jit(make_diagnose(config, policy, _shards(places)))

  def step(state: TrainState, prompts: Prompts, examples, diagnosed: bool):
    clock = [time.perf_counter()]
    key = jax.random.fold_in(state.key, state.step)
    samples = jax.block_until_ready(sampler(state.params, prompts, key))
    clock.append(time.perf_counter())
    poll()
    texts = experiment.decode(policy, samples)
    rewards = experiment.score(reward, examples, texts)
    clock.append(time.perf_counter())
    poll()
    found = {}
    if diagnosed:
      key = diagnosis_key(state)
      found = jax.device_get(diagnose(state.params, samples, rewards, key))
      clock.append(time.perf_counter())
      poll()
    state, row = learn(state, samples, rewards, ref_params)
    row = jax.device_get(row) | found
    clock.append(time.perf_counter())
    parts = ["rollout", "rewards", *["diagnosis"] * diagnosed, "update"]
    names = [f"seconds_{part}" for part in parts]
    row |= dict(zip(names, np.diff(clock), strict=True))
    shown = [
      {
        "prompt": examples[0]["prompt_text"],
        "completion": text,
        "answer": examples[0]["answer"],
        "reward": float(value),
      }
      for text, value in zip(texts[0], rewards[0], strict=True)
    ]
    return state, row, shown

  return step


def make_device_step(
  config: ConfigDict,
  policy: experiment.Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  places: TrainState,
):
  """The same step as one XLA program, with the reward on ids.

  It returns no samples: completions never reach the host.
  """
  _, reward = experiment.device_reward(config, policy)

  def whole(diagnose):
    step = make_grpo_step(
      policy.lm,
      tx,
      reward,
      group_size=group_size,
      max_new_tokens=config.sampling.max_new_tokens,
      eos_ids=policy.eos_ids,
      pad_id=policy.pad_id,
      advantage=experiment.advantage(config),
      kl_in_reward=experiment.kl_in_reward(config),
      diagnose=diagnose,
      **experiment.update_options(config),
    )
    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))

  plain = whole(None)
  with_diagnosis = whole(make_diagnose(config, policy, _shards(places)))

  def step(state: TrainState, prompts: Prompts, examples, diagnosed: bool):
    del examples
    run = with_diagnosis if diagnosed else plain
    state, row = run(state, prompts, ref_params)
    return state, jax.device_get(row), []

  return step
