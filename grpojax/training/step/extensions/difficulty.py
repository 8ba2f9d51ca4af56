"""Draws prompts according to their success rates, and updates the rates.

Success rates are part of the state (`TrainState.extras`, see
`statistics.success_rates`), indexed by prompt. A draw depends only on the
rates, the seed and the step, so a resumed run draws the same prompts. Process 0
draws for all processes.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from grpojax.core import meshes
from grpojax.core.binding import bind
from grpojax.core.types import Prompts, TrainState
from grpojax.data.drawn import ENDLESS
from grpojax.data.pipeline import Mixture
from grpojax.rewards.conventions import CORRECT
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.processes import distributed
from grpojax.statistics import prompt_sampling, success_rates
from grpojax.statistics.prompt_sampling import Stratum
from grpojax.statistics.success_rates import PRIORITIES, SuccessRates
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.policies import Policy
from grpojax.training.settings.batches import group_sizes, samples_per_step
from grpojax.training.settings.inputs import DIFFICULTY_OFF
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import scoring
from grpojax.training.step.draws import Examples
from grpojax.training.step.extension import (
  Extension,
  Inputs,
  extended,
  with_metrics,
)

NAME = "difficulty"
INDEX = "prompt_index"  # key of an example's index among the training prompts


def init_rates(settings: TrainSettings, examples: Any) -> SuccessRates | None:
  """Returns initial success rates; None without difficulty.priority.

  ValueError for an endless data set, or for a data set too small for its share
  of a step (with at most difficulty.rows groups per prompt).
  """
  priority = settings.difficulty.priority
  if priority == DIFFICULTY_OFF:
    return None

  def refuse(remedy):
    raise ValueError(config_error("difficulty.priority", priority, remedy))

  if len(examples) >= ENDLESS:
    refuse(
      "an endless data set never repeats a prompt, so success rates are "
      "unknown: set data.options.size, or use none"
    )
  # The smallest group size takes the most prompts per step.
  prompts = samples_per_step(settings) // min(group_sizes(settings))
  strata = _strata(examples)
  for size, weight in strata:
    share = prompts * weight / sum(stratum.weight for stratum in strata)
    if size * settings.difficulty.rows < share - 1e-6:
      refuse(
        f"a step takes {share:g} prompts of a data set that has {size}: lower "
        "batch_size, raise difficulty.rows, or use none"
      )
  return success_rates.unknown(len(examples))


def _strata(examples: Any) -> list[Stratum]:
  if isinstance(examples, Mixture):
    return [Stratum(len(x.examples), x.weight) for x in examples.parts]
  return [Stratum(len(examples), 1.0)]


def _aim(settings: TrainSettings, step: int) -> float:
  """Returns the success rate preferred by the priority `target` at a step."""
  first, last = settings.difficulty.target
  return first + (last - first) * min(step / max(settings.steps - 1, 1), 1.0)


def draw(
  settings: TrainSettings,
  policy: Policy,
  examples: Any,
  state: TrainState,
  group_size: int,
) -> tuple[Prompts, list[dict[str, Any]]]:
  """Draws the prompts of the state's step; returns them and their examples.

  Examples get their index as `INDEX`, and prompts get importance weights if
  difficulty.importance_weights is on.
  """
  difficulty = settings.difficulty
  step = int(state.step)
  rates = meshes.fetch(state.extras[NAME])
  seed = np.random.SeedSequence(settings.seed, spawn_key=(step,))
  options = dataclasses.asdict(difficulty) | {"group_size": group_size}
  options["target"] = _aim(settings, step)
  priority = bind(PRIORITIES[difficulty.priority], **options)

  def choose():
    indices, weights = prompt_sampling.draw(
      priority(*success_rates.posterior(rates)),
      _strata(examples),
      np.random.default_rng(seed),
      rows=samples_per_step(settings) // group_size,
      uniform=difficulty.uniform,
      most=difficulty.rows,
    )
    return indices.tolist(), weights.tolist()

  # Process 0 draws, because the last bits of logarithms may differ between
  # hosts, and with them the drawn prompts.
  indices, weights = distributed.on_main(choose)
  prompts, rows = prompts_lib.prompts_of(settings, policy, examples, indices)
  if difficulty.importance_weights:
    prompts = prompts.replace(weights=np.asarray(weights, np.float32))
  numbered = zip(rows, indices, strict=True)
  return prompts, [example | {INDEX: i} for example, i in numbered]


def metrics(
  state: TrainState, prompts: Prompts, examples: Examples
) -> dict[str, int | float]:
  """Returns the metrics of a step's success rates and draw.

  Mean and standard deviation are over all prompts; `prompts_seen` is the share
  with completions; `effective_prompts` is (sum w)^2 / sum w^2 of the weights.
  """
  rates = meshes.fetch(state.extras[NAME])
  a, b = success_rates.posterior(rates)
  numbers = {example[INDEX] for example in examples}
  row: dict[str, int | float] = {
    "success_rate_mean": float(np.mean(a / (a + b))),
    "success_rate_std": float(np.std(a / (a + b))),
    # a + b is 2 `PRIOR` before the first completion, and larger afterwards.
    "prompts_seen": float(np.mean(a + b > 2 * success_rates.PRIOR)),
    "prompts_asked": len(numbers),
  }
  if prompts.weights is not None:
    w = np.asarray(meshes.fetch(prompts.weights), np.float64)
    row["importance_weight_max"] = float(np.max(w))
    row["effective_prompts"] = float(np.sum(w) ** 2 / np.sum(w**2))
  return row


def extension(inputs: Inputs) -> Extension | None:
  """Chooses prompts by their success rates; None without a priority."""
  settings = inputs.settings
  if settings.difficulty.priority == DIFFICULTY_OFF:
    return None
  options = dataclasses.asdict(settings.difficulty)
  observe = bind(success_rates.observe, **options)

  def after_draw(state, drawn, context):
    del context
    return with_metrics(drawn, metrics(state, drawn.prompts, drawn.examples))

  def after_update(state, drawn, metrics):
    del metrics
    examples = drawn.examples
    right = scoring.correctness(inputs.reward_pool, drawn.rewards, examples)
    # NaN is no judgement, and a comparison alone would make it False.
    correct = np.where(np.isnan(right), np.nan, right >= CORRECT)
    indices = np.array([example[INDEX] for example in examples], np.int32)
    arrays = indices, correct.astype(np.float32)
    placed = meshes.place(arrays, inputs.mesh)
    rates = meshes.run_like(observe, state.extras[NAME], *placed)
    return extended(state, **{NAME: rates})

  return Extension(
    init=lambda: init_rates(settings, inputs.examples),
    choose=functools.partial(draw, settings, inputs.policy, inputs.examples),
    after_draw=after_draw,
    after_update=after_update,
  )
