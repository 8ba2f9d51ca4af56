"""Which group sizes a run may use: one, or those that "auto" moves among."""

import functools
from collections.abc import Mapping
from typing import Any

from grpojax.core.advantages import ADVANTAGES, SCALED_LEAVE_ONE_OUT
from grpojax.runtime.config import problem

AUTO = "auto"  # group_size: follow the best one


def group_sizes(leaves: Mapping[str, Any]) -> list[int]:
  """The group sizes that a run may use: one, or all powers of two between.

  Args:
    leaves: all settings by dotted path.
  """
  if leaves["group_size"] != AUTO:
    return [leaves["group_size"]]
  sizes = [max(leaves["auto_group_size.smallest"], 1)]
  while sizes[-1] < leaves["auto_group_size.largest"]:
    sizes.append(2 * sizes[-1])
  return sizes


def samples_per_step(leaves: Mapping[str, Any]) -> int:
  """N = B G, the same at every step.

  Args:
    leaves: all settings by dotted path.
  """
  auto = leaves["group_size"] == AUTO
  first = leaves["auto_group_size.start" if auto else "group_size"]
  return leaves["batch_size"] * first


def problems(leaves: Mapping[str, Any]) -> list[str]:
  """What a diagnosis, and a search for the best size need, a line each.

  Args:
    leaves: all settings by dotted path, each in its own range.
  """
  every = leaves["diagnostics.every"]
  if leaves["group_size"] == AUTO:
    return _auto(leaves)
  if every and (leaves["group_size"] < 4 or leaves["batch_size"] < 3):
    todo = "needs group_size of 4 or more and batch_size of 3 or more; 0 is off"
    return [problem("diagnostics.every", every, todo)]
  return []


def _auto(leaves: Mapping[str, Any]) -> list[str]:
  sizes, wrong = group_sizes(leaves), []
  for field in ("smallest", "start", "largest"):
    size = leaves[f"auto_group_size.{field}"]
    if size < 4 or size & (size - 1) or not sizes[0] <= size <= sizes[-1]:
      todo = "4 <= smallest <= start <= largest must be powers of two"
      wrong.append(problem(f"auto_group_size.{field}", size, todo))
  advantage = leaves["advantage"]
  if advantage in ADVANTAGES and advantage not in SCALED_LEAVE_ONE_OUT:
    todo = (
      "group_size = 'auto' follows the best size for "
      f"{' or '.join(SCALED_LEAVE_ONE_OUT)}, whose error the diagnostics "
      "estimate: use one of these, or a number for group_size"
    )
    wrong.append(problem("advantage", advantage, todo))
  if not leaves["diagnostics.every"]:
    todo = "group_size = 'auto' rests on the diagnostics: give 1 or more"
    wrong.append(problem("diagnostics.every", 0, todo))
  samples = samples_per_step(leaves)
  parts = leaves["optim.minibatches"]
  if wrong or min(samples, parts) < 1:
    return wrong
  prompts, largest = samples // sizes[-1], sizes[-1]
  say = functools.partial(problem, "auto_group_size.largest", largest)
  if prompts * largest != samples or prompts % parts:
    todo = (
      f"leaves {samples} / {largest} prompts a step, which must be a whole "
      f"multiple of optim.minibatches = {parts}: take a smaller one or more "
      "prompts"
    )
    return [say(todo)]
  if prompts < 3:
    return [say(f"leaves {prompts} prompts a step; a diagnosis needs 3")]
  return []
