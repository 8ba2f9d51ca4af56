"""Which settings of a loss may be, and which of them together."""

from collections.abc import Mapping
from typing import Any

from grpojax.core.types import LM
from grpojax.runtime.config import problem
from grpojax.training.group_sizes import AUTO


def problems(leaves: Mapping[str, Any]) -> list[str]:
  """What is wrong with the section `loss` as a whole, a line each.

  Args:
    leaves: all settings by dotted path, each in its own range.
  """
  wrong = []
  coefficient = leaves["loss.entropy_coef"]
  largest = leaves["loss.entropy_coef_max"]
  if leaves["loss.entropy_target"] and coefficient > largest:
    todo = f"starts above loss.entropy_coef_max = {largest}: give no more"
    wrong.append(problem("loss.entropy_coef", coefficient, todo))
  share = leaves["loss.top_entropy_quantile"]
  surrogate, ratio = leaves["loss.surrogate"], leaves["loss.ratio"]
  mixed = surrogate in ("clipped", "sapo") and ratio == "sequence_ratio"
  if share < 1 and (mixed or surrogate == "gmpo"):
    todo = (
      f"with loss.surrogate = {surrogate!r} and loss.ratio = {ratio!r} each "
      "token's loss has the gradient of its whole completion, so that none is "
      "left out: use 1, or another ratio or surrogate"
    )
    wrong.append(problem("loss.top_entropy_quantile", share, todo))
  off = {"loss.top_entropy_quantile": 1, "loss.advantage_clip": 0}
  for field, value in off.items():
    if leaves["group_size"] == AUTO and leaves[field] != value:
      todo = (
        "group_size = 'auto' follows the best size for the whole gradient: use "
        f"{value}, or a number for group_size"
      )
      wrong.append(problem(field, leaves[field], todo))
  return wrong


def check_model(router_aux_coef: float, lm: LM) -> None:
  """Whether the model has what the loss asks for.

  Raises:
    ValueError: it has no experts.
  """
  if router_aux_coef and lm.forward_with_load is None:
    todo = "balances experts, and the model has none (model.path): use 0"
    raise ValueError(problem("loss.router_aux_coef", router_aux_coef, todo))
