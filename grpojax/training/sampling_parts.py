"""Samples of a step in parts, and their rewards while the next part decodes."""

import functools
import time
from collections.abc import Callable

import jax
from jaxtyping import Array
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.rewards import groups
from grpojax.training import halves, samplers, scored_text, scoring
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy


def make_rewarded_samples(
  config: ConfigDict,
  policy: Policy,
  program: Callable[..., Rollout],
  mesh: jax.sharding.Mesh,
  reward_pool: scoring.RewardPool,
  check_signals: Callable[[], None],
  parts: int | None = None,
):
  """A step's samples with their rewards, in `sampling.parts`.

  All parts are dispatched at once, and decoded one after another. What is done
  becomes text, and goes to the workers while the devices are at the next part.

  Args:
    config: the run's.
    policy: the model.
    program: of `samplers.sampler_program`.
    mesh: of training.
    reward_pool: of the rewards.
    check_signals: called while it waits; may raise. Rewards that are being
      computed then are abandoned.
    parts: in which they are sampled; None is `sampling.parts`.

  Returns:
    `(params, prompts, examples, key, clock, first=None) -> (samples, texts,
    scores)`; to the clock are added the times when all samples were there, and
    all rewards. `first` is the number of the first prompt among those that
    share the key, None for 0.
  """
  parts = parts or config.sampling.parts
  sampler = samplers.on_sampling_mesh(config, program, mesh)
  split = jax.jit(functools.partial(halves.cut, parts=parts))
  whole = jax.jit(halves.join)

  def begun(params: Params, prompts: Prompts, key: Array, *first):
    if parts == 1:
      return [sampler(params, prompts, key, *first)]
    return [sampler(params, some, key, i) for some, i in split(prompts, *first)]

  def run(params, prompts, examples, key, clock, first=None):
    given = () if first is None else (mesh_lib.place(first, mesh),)
    drawn, scored = begun(params, prompts, key, *given), []
    rows = len(examples) // parts
    try:
      for i, part in enumerate(drawn):
        policy_lib.wait(part, check_signals)
        ready = time.perf_counter()
        of_part = examples[i * rows :][:rows]
        scored.append(scored_text.begin(policy, reward_pool, of_part, part))
    except BaseException:
      groups.abandon([part.pending for part in scored])
      raise
    clock.append(ready)
    texts, scores = scored_text.finish(
      reward_pool, examples, scored, check_signals
    )
    clock.append(time.perf_counter())
    return drawn[0] if parts == 1 else whole(drawn), texts, scores

  return run
