"""Which settings of a loss may be, and which of them together."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.core.types import LM
from grpojax.runtime.config import problem
from grpojax.training.group_sizes import AUTO

_NOT_NEGATIVE = (
  "gmpo_clip_low gmpo_clip_high vespo_k_pos vespo_k_neg advantage_clip "
  "entropy_coef entropy_target entropy_coef_delta entropy_coef_max "
  "router_aux_coef"
).split()
_POSITIVE = (
  "sapo_temperature_pos sapo_temperature_neg vespo_lambda_pos vespo_lambda_neg"
).split()


def problems(leaves: Mapping[str, Any]) -> list[str]:
  """What is wrong with the section `loss`, a line each.

  Args:
    leaves: all settings by dotted path.
  """
  return _ranges(leaves) or _together(leaves)


def check_model(router_aux_coef: float, lm: LM) -> None:
  """Whether the model has what the loss asks for.

  Raises:
    ValueError: it has no experts.
  """
  if router_aux_coef and lm.forward_with_load is None:
    todo = "balances experts, and the model has none (model.path): use 0"
    raise ValueError(problem("loss.router_aux_coef", router_aux_coef, todo))


def _ranges(leaves: Mapping[str, Any]) -> list[str]:
  wrong = []

  def need(name, holds, todo):
    value = leaves[f"loss.{name}"]
    if not (holds(value) and math.isfinite(value)):
      wrong.append(problem(f"loss.{name}", value, todo))

  for name in _NOT_NEGATIVE:
    need(name, lambda x: x >= 0, "must be 0 or more")
  for name in _POSITIVE:
    need(name, lambda x: x > 0, "must be more than 0")
  bounds = "it bounds the ratio itself, which is 1 on-policy"
  need("cispo_min", lambda x: 0 <= x <= 1, f"must be in [0, 1]: {bounds}")
  need("cispo_max", lambda x: x >= 1, f"must be 1 or more: {bounds}")
  todo = "is a share of the tokens: must be in [0, 1]; 1 is all"
  need("top_entropy_quantile", lambda x: 0 <= x <= 1, todo)
  return wrong


def _together(leaves: Mapping[str, Any]) -> list[str]:
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
