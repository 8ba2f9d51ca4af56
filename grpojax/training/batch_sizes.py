"""Which batches a run may have: how they are cut, what an advantage takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.core.advantages import ADVANTAGES
from grpojax.core.binding import bind
from grpojax.runtime.config import problem
from grpojax.training import group_sizes

_TRIED = 256  # prompts, and samples of each, that an advantage is tried on


def _divisions(leaves: dict[str, Any]) -> list[str]:
  batch, minibatches = leaves["batch_size"], leaves["optim.minibatches"]
  micro = leaves["optim.micro_batches"]
  if min(batch, minibatches, micro) < 1:
    return []  # reported as ranges
  if batch % minibatches:
    todo = f"must divide batch_size = {batch} (prompts; groups stay whole)"
    return [problem("optim.minibatches", minibatches, todo)]
  if (batch // minibatches) % micro:
    todo = (
      "must divide the prompts of a minibatch, batch_size / "
      f"optim.minibatches = {batch // minibatches}"
    )
    return [problem("optim.micro_batches", micro, todo)]
  return []


def _mesh(leaves: dict[str, Any]) -> list[str]:
  fields = ("mesh.data", "mesh.fsdp", "mesh.tensor")
  sizes = [leaves[field] for field in fields]
  todo = "must be 1 or more, or -1 for all the other devices"
  wrong = [
    problem(field, size, todo)
    for field, size in zip(fields, sizes, strict=True)
    if size < 1 and size != -1
  ]
  if sizes.count(-1) > 1:
    todo = "only one axis may be -1 (all the other devices)"
    wrong.append(problem("mesh", tuple(sizes), todo))
  if min(sizes[:2]) >= 1:
    parts = leaves["optim.minibatches"] * leaves["optim.micro_batches"]
    rows = leaves["batch_size"] // max(parts, 1)
    if rows % (sizes[0] * sizes[1]):
      todo = (
        f"mesh.data x mesh.fsdp = {sizes[0] * sizes[1]} must divide the "
        f"{rows} prompts of a micro-batch"
      )
      wrong.append(problem("batch_size", leaves["batch_size"], todo))
  return wrong


def _refusal(advantage, prompts: int, group_size: int) -> str:
  """Why an advantage cannot work with a batch of these shapes; "" if it can.

  Nothing is computed.
  """
  array = functools.partial(jax.ShapeDtypeStruct, (prompts, group_size))

  def trial(rewards, lengths):
    return bind(advantage, lengths=lengths)(rewards)

  try:
    jax.eval_shape(trial, array(jnp.float32), array(jnp.int32))
  except ValueError as error:
    return str(error)
  return ""


def _advantage(leaves: dict[str, Any]) -> list[str]:
  """Batches that the advantage refuses, and the next larger one that it takes.

  It is tried on the run's shapes, so that it needs no other check than its own.
  """
  name, k = leaves["advantage"], leaves["subset_size"]
  sizes = group_sizes.group_sizes(leaves)
  if name not in ADVANTAGES or min(*sizes, leaves["batch_size"]) < 1:
    return []  # reported as names or as ranges
  advantage = bind(ADVANTAGES[name], k=k)
  takes_k = advantage is not ADVANTAGES[name]
  for size in sorted({min(sizes), max(sizes)}):
    # What is too small for it is small: large shapes only make large tables.
    prompts = min(group_sizes.samples_per_step(leaves) // size, _TRIED)
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
      todo = (
        f"too many for advantage = {name!r}: use a group_size of {enough[0]} "
        f"or more (now {size}), or a smaller subset_size"
      )
      return [problem("subset_size", k, todo)]
    if enough:
      todo = f"advantage = {name!r} compares completions of a prompt: use "
      return [problem("group_size", size, f"{todo}{enough[0]} or more")]
    if more:
      todo = f"advantage = {name!r} compares prompts: use {prompts + more[0]} "
      return [problem("batch_size", prompts, f"{todo}or more")]
    return [problem("advantage", name, refusal)]
  return []


def problems(leaves: dict[str, Any]) -> list[str]:
  """What is wrong with the sizes of batches, a line each.

  Args:
    leaves: all settings by dotted path, each in its own range.
  """
  return _divisions(leaves) + _mesh(leaves) + _advantage(leaves)
