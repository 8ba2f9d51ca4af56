"""Which batches a run may have: how they are cut, what an advantage takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from grpojax.core import micro_batches
from grpojax.core.advantages import ADVANTAGES
from grpojax.core.binding import bind
from grpojax.core.mesh import (
  AXES,
  check_rows,
  row_shards,
  sample_cuts,
  sampling_mesh,
)
from grpojax.core.weighted_baselines import init_score_norms
from grpojax.runtime.config import config_error, flatten
from grpojax.training import filter_groups, group_sizes

_TRIED = 256  # prompts, and samples of each, that an advantage is tried on


def _divisions(flat_config: dict[str, Any]) -> list[str]:
  batch, minibatches = (
    flat_config["batch_size"],
    flat_config["optim.minibatches"],
  )
  micro = flat_config["optim.micro_batches"]
  if min(batch, minibatches, micro) < 1:
    return []  # reported as ranges
  if batch % minibatches:
    remedy = f"must divide batch_size = {batch} (prompts; groups stay whole)"
    return [config_error("optim.minibatches", minibatches, remedy)]
  fields = ["sampling.parts"]
  fields += ["filter_groups.gen_parts"] * flat_config["filter_groups.enable"]
  for size in filter(
    lambda size: size > 0, group_sizes.group_sizes(flat_config)
  ):
    prompts = group_sizes.samples_per_step(flat_config) // size
    for field in fields:
      if (parts := flat_config[field]) > 0 and prompts % parts:
        remedy = (
          f"must divide a step's prompts, {prompts} with groups of {size}"
        )
        return [config_error(field, parts, remedy)]
    rows = prompts // minibatches
    try:
      micro_batches.cuts(rows, size, micro)
    except ValueError as error:
      return [config_error("optim.micro_batches", micro, str(error))]
  return []


def _mesh(flat_config: dict[str, Any]) -> list[str]:
  fields = [f"mesh.{axis}" for axis in AXES]
  sizes = [flat_config[field] for field in fields]
  remedy = "must be 1 or more, or -1 for all the other devices"
  errors = [
    config_error(field, size, remedy)
    for field, size in zip(fields, sizes, strict=True)
    if size < 1 and size != -1
  ]
  if sizes.count(-1) > 1:
    remedy = "only one axis may be -1 (all the other devices)"
    errors.append(config_error("mesh", tuple(sizes), remedy))
  shared = flat_config["mesh.sampling_tensor"]
  if (
    shared
    and flat_config["reward.on_device"]
    and shared != flat_config["mesh.tensor"]
  ):
    remedy = "reward.on_device is one program on one mesh: use 0"
    errors.append(config_error("mesh.sampling_tensor", shared, remedy))
  return errors


def check(config: ConfigDict, mesh: Mesh) -> None:
  """Whether a run's batches can be cut over its mesh.

  Args:
    config: the run's.
    mesh: from `core.mesh.make_mesh`.

  Raises:
    ValueError: a batch that cannot, with the numbers.
  """
  optim, flat_config = config.optim, flatten(config)
  sampling = sampling_mesh(mesh, config.mesh.sampling_tensor)
  check_rows(sampling, eval_batch=config.eval.batch_size)
  for size in group_sizes.group_sizes(flat_config):
    rows = group_sizes.samples_per_step(flat_config) // size
    for parts in {config.sampling.parts, filter_groups.draw_parts(config)}:
      prompts = rows // parts
      check_rows(sampling, size, rollout=prompts)
      _check_slots(config.sampling.slots, sampling, prompts, size)
    minibatch = rows // optim.minibatches
    with jax.set_mesh(mesh):
      cut = micro_batches.cuts(minibatch, size, optim.micro_batches)
    check_rows(mesh, size // cut[1], micro_batch=minibatch // cut[0])


def _check_slots(slots: int, mesh: Mesh, prompts: int, group_size: int):
  """Whether each device has whole groups, where slots take their samples."""
  with jax.set_mesh(mesh):
    _, of_groups = sample_cuts(prompts, group_size)
  if 0 < slots < group_size and of_groups > 1:
    remedy = (
      f"{row_shards(mesh)} devices share {prompts} prompts, and so cut their "
      "groups, whose samples go through the slots together: use 0, or more "
      "prompts at once"
    )
    raise ValueError(config_error("sampling.slots", slots, remedy))


def _refusal(advantage, prompts: int, group_size: int) -> str:
  """Why an advantage cannot work with a batch of these shapes; "" if it can.

  Nothing is computed.
  """
  array = functools.partial(jax.ShapeDtypeStruct, (prompts, group_size))

  def trial(rewards, lengths):
    offered = {"lengths": lengths, "logit_score_sq": rewards}
    offered["score_norms"] = init_score_norms()
    return bind(advantage, **offered)(rewards)

  try:
    jax.eval_shape(trial, array(jnp.float32), array(jnp.int32))
  except ValueError as error:
    return str(error)
  return ""


def _advantage(flat_config: dict[str, Any]) -> list[str]:
  """Batches that the advantage refuses, and the next larger one that it takes.

  It is tried on the run's shapes, so that it needs no other check than its own.
  """
  name, k = flat_config["advantage"], flat_config["subset_size"]
  sizes = group_sizes.group_sizes(flat_config)
  if name not in ADVANTAGES or min(*sizes, flat_config["batch_size"]) < 1:
    return []  # reported as names or as ranges
  advantage = bind(ADVANTAGES[name], k=k)
  takes_k = advantage is not ADVANTAGES[name]
  for size in sorted({min(sizes), max(sizes)}):
    # What is too small for it is small: large shapes only make large tables.
    prompts = min(group_sizes.samples_per_step(flat_config) // size, _TRIED)
    size = min(size, max(_TRIED, k + 1) if takes_k else _TRIED)
    refusal = _refusal(advantage, prompts, size)
    if not refusal:
      continue
    larger = {*range(size + 1, size + 9), *[k + 1] * takes_k}
    larger = sorted(g for g in larger if g > size)
    enough = [g for g in larger if not _refusal(advantage, prompts, g)]
    more = [
      b for b in range(1, 9) if not _refusal(advantage, prompts + b, size)
    ]
    if enough and takes_k:
      remedy = (
        f"too many for advantage = {name!r}: use a group_size of {enough[0]} "
        f"or more (now {size}), or a smaller subset_size"
      )
      return [config_error("subset_size", k, remedy)]
    if enough:
      remedy = f"advantage = {name!r} compares completions of a prompt: use "
      return [config_error("group_size", size, f"{remedy}{enough[0]} or more")]
    if more:
      remedy = (
        f"advantage = {name!r} compares prompts: use {prompts + more[0]} "
      )
      return [config_error("batch_size", prompts, f"{remedy}or more")]
    return [config_error("advantage", name, refusal)]
  return []


def config_errors(flat_config: dict[str, Any]) -> list[str]:
  """What is wrong with the sizes of batches, a line each.

  Args:
    flat_config: all settings by dotted path, each in its own range.
  """
  return _divisions(flat_config) + _mesh(flat_config) + _advantage(flat_config)
