"""Which settings of a loss may be, and which of them together."""

from collections.abc import Mapping
from typing import Any

from grpojax.core.types import LM
from grpojax.runtime.config import config_error
from grpojax.training.group_sizes import AUTO


def config_errors(flat_config: Mapping[str, Any]) -> list[str]:
  """What is wrong with the section `loss` as a whole, a line each.

  Args:
    flat_config: all settings by dotted path, each in its own range.
  """
  errors = []
  coefficient = flat_config["loss.entropy_coef"]
  largest = flat_config["loss.entropy_coef_max"]
  if flat_config["loss.entropy_target"] and coefficient > largest:
    remedy = f"starts above loss.entropy_coef_max = {largest}: give no more"
    errors.append(config_error("loss.entropy_coef", coefficient, remedy))
  share = flat_config["loss.top_entropy_quantile"]
  surrogate, ratio = flat_config["loss.surrogate"], flat_config["loss.ratio"]
  mixed = surrogate in ("clipped", "sapo") and ratio == "sequence_ratio"
  if share < 1 and (mixed or surrogate == "gmpo"):
    remedy = (
      f"with loss.surrogate = {surrogate!r} and loss.ratio = {ratio!r} each "
      "token's loss has the gradient of its whole completion, so that none is "
      "left out: use 1, or another ratio or surrogate"
    )
    errors.append(config_error("loss.top_entropy_quantile", share, remedy))
  off = {"loss.top_entropy_quantile": 1, "loss.advantage_clip": 0}
  for field, value in off.items():
    if flat_config["group_size"] == AUTO and flat_config[field] != value:
      remedy = (
        "group_size = 'auto' follows the best size for the whole gradient: use "
        f"{value}, or a number for group_size"
      )
      errors.append(config_error(field, flat_config[field], remedy))
  return errors


def check_model(router_aux_coef: float, lm: LM) -> None:
  """Whether the model has what the loss asks for.

  Raises:
    ValueError: it has no experts.
  """
  if router_aux_coef and lm.forward_with_load is None:
    remedy = "balances experts, and the model has none (model.path): use 0"
    raise ValueError(
      config_error("loss.router_aux_coef", router_aux_coef, remedy)
    )
