"""Which group sizes a run may use: one, or those that "auto" moves among."""

from collections.abc import Mapping
from typing import Any

from grpojax.core.advantages import ADVANTAGES, SCALED_LEAVE_ONE_OUT

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
    return [
      f"diagnostics.every = {every}: needs group_size of 4 or more and "
      "batch_size of 3 or more; 0 is off"
    ]
  return []


def _auto(leaves: Mapping[str, Any]) -> list[str]:
  sizes, wrong = group_sizes(leaves), []
  for field in ("smallest", "start", "largest"):
    size = leaves[f"auto_group_size.{field}"]
    if size < 4 or size & (size - 1) or not sizes[0] <= size <= sizes[-1]:
      wrong.append(
        f"auto_group_size.{field} = {size}: 4 <= smallest <= start <= largest "
        "must be powers of two"
      )
  advantage = leaves["advantage"]
  if advantage in ADVANTAGES and advantage not in SCALED_LEAVE_ONE_OUT:
    wrong.append(
      f"advantage = {advantage!r}: group_size = 'auto' follows the best size "
      f"for {' or '.join(SCALED_LEAVE_ONE_OUT)}, whose error the diagnostics "
      "estimate: use one of these, or a number for group_size"
    )
  if not leaves["diagnostics.every"]:
    wrong.append(
      "diagnostics.every = 0: group_size = 'auto' rests on the diagnostics: "
      "give 1 or more"
    )
  samples = samples_per_step(leaves)
  parts = leaves["optim.minibatches"]
  if wrong or min(samples, parts) < 1:
    return wrong
  prompts, largest = samples // sizes[-1], sizes[-1]
  field = f"auto_group_size.largest = {largest}"
  if prompts * largest != samples or prompts % parts:
    return [
      f"{field}: leaves {samples} / {largest} prompts a step, which must be a "
      f"whole multiple of optim.minibatches = {parts}: take a smaller one or "
      "more prompts"
    ]
  if prompts < 3:
    return [f"{field}: leaves {prompts} prompts a step; a diagnosis needs 3"]
  return []
