"""Sizes of a run's batches: group sizes, and their division into parts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax.core.advantages import ADVANTAGES
from grpojax.core.advantages.weighted_baselines import init_score_norms
from grpojax.core.binding import bind
from grpojax.core.mesh import check_rows, sampling_mesh
from grpojax.core.packing import micro_batches
from grpojax.runtime.cli.config import config_error
from grpojax.training.settings.run import AUTO, TrainSettings

_TRIED = 256  # prompts, and samples of each, that an advantage is tried on


def group_sizes(s: TrainSettings) -> list[int]:
  """Returns the group sizes of a run: one, or all powers of two between."""
  if s.group_size != AUTO:
    return [s.group_size]
  sizes = [s.auto_group_size.smallest]
  while sizes[-1] < s.auto_group_size.largest:
    sizes.append(2 * sizes[-1])
  return sizes


def samples_per_step(s: TrainSettings) -> int:
  """Returns the number of samples N = B G, the same at every step."""
  first = s.auto_group_size.start if s.group_size == AUTO else s.group_size
  return s.batch_size * first


def draw_parts(s: TrainSettings) -> int:
  """Returns the equal parts of a step's prompts that a draw takes one of."""
  return s.filter_groups.gen_parts if s.filter_groups.enable else 1


def _division_errors(s: TrainSettings) -> list[str]:
  """The first error of batches that do not divide into their parts."""
  update = s.optim.update
  if s.batch_size % update.minibatches:
    remedy = (
      f"must divide batch_size = {s.batch_size} (prompts; groups stay whole)"
    )
    return [config_error("optim.minibatches", update.minibatches, remedy)]
  parts = {"sampling.parts": s.sampling.parts}
  parts["filter_groups.gen_parts"] = draw_parts(s)
  for size in group_sizes(s):
    prompts = samples_per_step(s) // size
    for setting, count in parts.items():
      if prompts % count:
        remedy = (
          f"must divide a step's prompts, {prompts} with groups of {size}"
        )
        return [config_error(setting, count, remedy)]
    minibatch, micro = prompts // update.minibatches, update.micro_batches
    try:
      micro_batches.cuts(minibatch, size, micro)
    except ValueError as error:
      return [config_error("optim.micro_batches", micro, str(error))]
  return []


def _auto_errors(s: TrainSettings) -> list[str]:
  """Errors of the group sizes that "auto" moves among."""
  if s.group_size != AUTO:
    return []
  auto, errors = s.auto_group_size, []
  for name in ("smallest", "start", "largest"):
    size = getattr(auto, name)
    power = size >= 4 and size & (size - 1) == 0
    if not power or not auto.smallest <= size <= auto.largest:
      remedy = "4 <= smallest <= start <= largest must be powers of two"
      errors.append(config_error(f"auto_group_size.{name}", size, remedy))
  samples, updates = samples_per_step(s), s.optim.update.minibatches
  prompts, left = divmod(samples, auto.largest)
  if not errors and (left or prompts % updates or prompts < 3):
    remedy = (
      f"leaves {samples} / {auto.largest} prompts a step, which must be 3 or "
      f"more (for a diagnosis) and a whole multiple of optim.minibatches = "
      f"{updates}: take a smaller one or more prompts"
    )
    errors = [config_error("auto_group_size.largest", auto.largest, remedy)]
  return errors


def _advantage_errors(s: TrainSettings) -> list[str]:
  """Errors of batches that the advantage refuses, in its own words.

  It is tried on the run's shapes, so that it needs no other check than its own;
  nothing is computed.
  """
  name, k = s.loss.advantage, s.loss.subset_size
  advantage = bind(ADVANTAGES[name], k=k)
  takes_k = advantage is not ADVANTAGES[name]

  def trial(rewards, lengths):
    return bind(
      advantage,
      lengths=lengths,
      logit_score_sq=rewards,
      score_norms=init_score_norms(),
    )(rewards)

  sizes = group_sizes(s)
  for size in sorted({min(sizes), max(sizes)}):
    # A large batch refuses nothing that a smaller one takes: tables stay small.
    prompts = min(samples_per_step(s) // size, _TRIED)
    shape = prompts, min(size, max(_TRIED, k + 1) if takes_k else _TRIED)
    arrays = (jax.ShapeDtypeStruct(shape, x) for x in (jnp.float32, jnp.int32))
    try:
      jax.eval_shape(trial, *arrays)
    except ValueError as error:
      of_k = f", subset_size = {k}" if takes_k else ""
      shapes = f"batch_size = {prompts}, group_size = {size}{of_k}"
      return [config_error("advantage", name, f"refuses {shapes}: {error}")]
  return []


def errors(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  """Returns a line for each error of the sizes of batches."""
  del flat
  return (_auto_errors(s) or _division_errors(s)) + _advantage_errors(s)


def check_mesh(s: TrainSettings, mesh: Mesh) -> None:
  """Checks that a run's batches divide over the mesh of all devices.

  Raises:
    ValueError: A batch that does not, with the numbers.
  """
  update = s.optim.update
  sampling = sampling_mesh(mesh, s.mesh.sampling_tensor)
  check_rows(sampling, eval_batch=s.eval.batch_size)
  for size in group_sizes(s):
    rows = samples_per_step(s) // size
    for parts in {s.sampling.parts, draw_parts(s)}:
      check_rows(sampling, size, rollout=rows // parts)
    minibatch = rows // update.minibatches
    with jax.set_mesh(mesh):
      split = micro_batches.cuts(minibatch, size, update.micro_batches)
    check_rows(mesh, size // split[1], micro_batch=minibatch // split[0])
