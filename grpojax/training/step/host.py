"""Training step with rewards on the host.

    draw -> extensions -> make batch -> update -> extensions

The parts on the devices are programs, compiled at their first use. Only the
update changes the state, so a signal before it leaves the state as it was.

With sampling.ahead = 1 a step also draws the next step's completions from the
same parameters, and computes their rewards during the update:

    devices   sample s+1 | update s           | sample s+2 ...
    host                 | text, rewards s+1  |
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from grpojax.core import meshes
from grpojax.core.types import Batch, Prompts, TrainState
from grpojax.core.update import make_update, read_by_update
from grpojax.training import policies
from grpojax.training.settings import mixtures
from grpojax.training.settings.batches import own_sampling_mesh
from grpojax.training.step import draws, reference, sampling, scoring
from grpojax.training.step.batch import make_batch_program, plan_packing
from grpojax.training.step.draws import Draw, Examples, Timer
from grpojax.training.step.engine import sampler as engine
from grpojax.training.step.extension import (
  Context,
  Drawn,
  Extension,
  Inputs,
  StepResult,
  after_update,
  updated,
)
from grpojax.training.step.extensions import moving_reference


class Step(NamedTuple):
  """What the steps of a run with one group size have in common."""

  inputs: Inputs
  extensions: Mapping[str, Extension]
  source: draws.Source
  make_batch: Callable[..., tuple[Batch, dict[str, Array]]]
  update: Callable[..., tuple[TrainState, dict[str, Array]]]
  # Prompts of the reference for examples; None if they are the policy's
  reference_prompts: Callable[[Examples], Prompts] | None = None


def update_program(inputs: Inputs) -> Callable[..., Any]:
  """Compiles the update, `(state, batch, ref_params) -> (state, metrics)`.

  The state is donated; it is the part that `read_by_update` selects. Only an
  exact KL term needs `ref_params`.
  """
  settings = inputs.settings
  policy = inputs.policy
  ref_lm = policy.teacher and policy.teacher.lm

  def update(lm, state, batch, ref_params=None):
    run = make_update(
      lm,
      inputs.tx,
      settings.loss,
      settings.optim.update,
      settings.sampling.distribution,
      ref_lm,
    )
    return run(state, batch, ref_params)

  shardings = read_by_update(inputs.shardings)
  return policies.jit(
    policy, update, donate_argnums=1, out_shardings=(shardings, None)
  )


def open_step(
  inputs: Inputs,
  extensions: Mapping[str, Extension],
  group_size: int,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Step:
  """Returns what steps with a group size share.

  `budgets(prompts)` [B, G], if any, limits the tokens of each sample.
  """
  settings = inputs.settings
  policy = inputs.policy
  ref_lm = policy.teacher and policy.teacher.lm
  mesh = inputs.mesh
  sampling_mesh = own_sampling_mesh(settings, mesh)
  if settings.sampling.engine:
    sampler = engine.make_sampler(
      settings,
      policy,
      group_size,
      inputs.directory,
      mesh,
      inputs.check_signals,
    )
  else:
    sampler = sampling.make_sampler(
      settings,
      policies.sampled_by(policy, settings.loss),
      group_size,
      settings.sampling.distribution,
      mesh,
      inputs.reward_pool.environment,
      sampling_mesh=sampling_mesh,
      budgets=budgets,
    )
  source = draws.Source(
    policy,
    sampler,
    inputs.reward_pool,
    mesh,
    inputs.check_signals,
    settings.sampling.parts,
  )
  if settings.mesh.sampling_devices:  # they need copies of the parameters
    dtype = settings.model.dtype
    source = source._replace(
      move=sampling.moved_params(policy, dtype, sampling_mesh)
    )
  return Step(
    inputs,
    extensions,
    source,
    policies.jit(policy, make_batch_program(settings, ref_lm)),
    update_program(inputs),
    reference.make_read_prompts(settings, policy, mesh),
  )


def take_step(
  step: Step,
  state: TrainState,
  prompts: Prompts,
  examples: Examples,
  take: Callable[[], tuple[Prompts, Examples]] | None = None,
  upcoming: tuple[Prompts, Examples] | None = None,
) -> StepResult:
  """Performs one step; the state is donated.

  If the state has a pending draw, `prompts` and `examples` must be its own.
  With `upcoming`, the next step's prompts and examples, this step also draws
  the next step's completions. `take` returns the stream's next prompts.
  """
  inputs = step.inputs
  settings = inputs.settings
  check_signals = inputs.check_signals
  timer = Timer()
  updating = threading.Event()
  number = int(meshes.fetch(state.step)) + 1
  key = jax.random.fold_in(state.key, state.step)
  pending = state.pending
  state = state.replace(pending=None)

  first = pending and with_examples(pending, examples)
  if first is None:
    drawing = draws.draw(
      *(step.source, state.params, prompts, examples, key, timer), np.int32(0)
    )
    first = drawing.collect()
  # Start to draw the next step's samples from the same parameters.
  ahead = None
  if upcoming:
    ahead = _draw_ahead(
      step, state, upcoming, timer, lambda: updating.is_set() or check_signals()
    )
  check_signals(together=True)
  drawn = Drawn(first, first.rewards, examples, prompts)
  context = Context(number, key, timer, step.source, take, ahead)
  for extension in step.extensions.values():
    if extension.after_draw:
      drawn = extension.after_draw(state, drawn, context)
  check_signals(together=True)

  # Compute the advantages and log-probabilities of the batch.
  batch, batch_metrics = make_batch(step, state, drawn)
  if ahead and not settings.mesh.sampling_devices:
    # Shared devices finish the next step's samples before they run the batch.
    policies.wait(ahead.started, check_signals)
    timer("rollout")
  policies.wait(batch, check_signals)
  timer("reference")

  # The state changes from here on, so signals are no longer checked.
  updating.set()
  state, update_metrics = update(step, state, batch)
  # Compute the next step's rewards while the devices update.
  pending = None
  # If it fails, the next step draws these samples itself, or stops the run.
  with contextlib.suppress(sampling.NoSamples):
    pending = ahead.collect() if ahead else None
  metrics = {
    **meshes.fetch(batch_metrics | update_metrics),
    **drawn.metrics,
    **scoring.metrics(drawn.rewards),
    **mixtures.metrics(settings, drawn.examples, drawn.rewards.rewards),
  }
  state = after_update(step.extensions, state, drawn, metrics)
  timer("update")
  metrics |= {f"seconds_{name}": s for name, s in timer.seconds.items()}
  return StepResult(state.replace(pending=pending), metrics, drawn, batch)


def with_examples(pending: Draw, examples: Examples) -> Draw:
  """Returns a draw of these examples, with the prompts that the draw read."""
  read = zip(examples, pending.examples, strict=True)
  return pending._replace(examples=[x | prompt for x, prompt in read])


def _draw_ahead(
  step: Step,
  state: TrainState,
  upcoming: tuple[Prompts, Examples],
  timer: Timer,
  check_signals: Callable[[], Any],
) -> draws.Drawing:
  key = jax.random.fold_in(state.key, state.step + 1)
  params = state.params
  if step.inputs.reward_pool.environment is not None:
    # The update donates the parameters, but later turns still need them.
    params = meshes.run_like(reference.copied, params)
  args = step.source, params, *upcoming, key, timer, np.int32(0), check_signals
  return draws.draw(*args)


def make_batch(
  step: Step, state: TrainState, drawn: Drawn
) -> tuple[Batch, dict[str, Array]]:
  """Returns the batch of the update, and metrics of its completions."""
  inputs = step.inputs
  settings = inputs.settings
  rollout, rewards, examples, _ = drawn.batch
  if drawn.used is not None:
    used = np.where(drawn.used[:, None], rewards.rewards, np.float32(np.nan))
    rewards = rewards._replace(rewards=used)
  placed, values = scoring.place_rewards(settings, rewards, inputs.mesh)
  ref_prompts = None
  if step.reference_prompts:
    ref_prompts = step.reference_prompts(examples)
  return step.make_batch(
    state.params,
    rollout,
    placed,
    ref_params=moving_reference.params(inputs, state),
    ref_prompts=ref_prompts,
    packing=plan_packing(settings, rollout, rewards.rewards, inputs.mesh),
    values=values,
    scale=meshes.place(drawn.scale, inputs.mesh),
    prompt_weights=drawn.prompts.weights,
  )


def update(
  step: Step, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Array]]:
  """Updates the policy."""
  ref_params = None
  # Only an exact KL term runs the reference model in the update.
  if step.inputs.settings.loss.has_exact_kl:
    ref_params = moving_reference.params(step.inputs, state)
  return updated(step.update, state, batch, ref_params)
