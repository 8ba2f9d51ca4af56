"""Draws: completions of prompts, with their rewards.

All parts of a draw are dispatched at once, and each is rewarded while the
devices decode the next:

    devices   sample part 1 | sample part 2        |
    host                    | text, rewards of 1   | text, rewards of 2

Environments of one part answer while the devices decode another part.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from grpojax.core import meshes
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.environments.episodes import as_completed
from grpojax.rewards.pool import GroupRewards
from grpojax.runtime.processes.workers import abandon
from grpojax.training import policies
from grpojax.training.step import sampling, scoring

Examples = list[dict[str, Any]]


class Timer:
  """Stopwatch; `seconds` are the sums of named intervals."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def __call__(self, name: str) -> None:
    """Adds the time since the last call, or the start, to `seconds[name]`."""
    now = time.perf_counter()
    self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
    self._last = now


class Draw(NamedTuple):
  """Completions of a batch's prompts and their rewards."""

  rollout: Rollout
  rewards: GroupRewards
  examples: Examples
  texts: scoring.Texts | None = None  # if the source keeps them


class Drawing(NamedTuple):
  """A draw in progress."""

  started: PyTree  # arrays in computation
  collect: Callable[[], Draw]  # waits for completions and rewards


class Source(NamedTuple):
  """A model with its sampler and rewards, from which groups are drawn."""

  policy: policies.Policy
  sampler: sampling.Sampler
  reward_pool: scoring.RewardPool
  mesh: jax.sharding.Mesh | None = None  # None: one device
  check_signals: Callable[..., None] = lambda together=False: None
  parts: int = 1
  keeps_texts: bool = False
  move: Callable[[Params], Params] = lambda params: params  # to its devices


def draw(
  source: Source,
  params: Params,
  prompts: Prompts,
  examples: Examples,
  key: Array,
  timer: Timer,
  first_prompt: np.int32 | None = None,
  check_signals: Callable[[], None] | None = None,
) -> Drawing:
  """Starts to draw a group of completions for each prompt.

  `first_prompt` is the index of the first prompt among all drawn with `key`.
  `check_signals`, by default the source's, is called while waiting.
  """
  check = check_signals or source.check_signals
  parts = source.parts
  # Split the batch into parts, with the indices of their first prompts.
  first = (
    [] if first_prompt is None else [meshes.place(first_prompt, source.mesh)]
  )
  batches = [(prompts, *first)]
  if parts > 1:
    batches = sampling.split(prompts, *first, parts=parts)
  size = len(examples) // parts
  of_parts = [examples[i * size :][:size] for i in range(parts)]
  params = source.move(params)
  plays = [
    source.sampler(
      params, part, part_examples, key, *number, check_signals=check
    )
    for (part, *number), part_examples in zip(batches, of_parts, strict=True)
  ]
  # `next` dispatches the sampling; `as_completed` continues it.
  started = [next(play) for play in plays]

  @functools.cache
  def collect() -> Draw:
    sampled = [None] * parts
    submitted = [None] * parts
    try:
      # Submit a part's texts to the reward workers as soon as it is sampled.
      for done, (i, part) in enumerate(as_completed(plays), start=1):
        policies.wait(part.rollout, check)
        sampled[i] = part
        if done == parts:
          timer("rollout")
        submitted[i] = scoring.submit_rollout(
          source.policy, source.reward_pool, of_parts[i], part
        )
    except BaseException:
      abandon([part.pending for part in submitted if part is not None])
      raise
    texts, rewards = scoring.collect_rewards(
      *(source.reward_pool, examples, submitted, check, source.keeps_texts)
    )
    timer("rewards")
    for part in sampled:
      for name, seconds in part.seconds.items():
        timer.seconds[name] = timer.seconds.get(name, 0.0) + seconds
    rollouts = [part.rollout for part in sampled]
    rollout = rollouts[0] if parts == 1 else sampling.join(rollouts)
    return Draw(
      rollout, rewards, examples, texts if source.keeps_texts else None
    )

  return Drawing(started, collect)
