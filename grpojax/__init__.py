"""GRPO for JAX: the group is an array axis.

The functions most programs need, by their short names; the rest is in
`grpojax.core` (pure functions of arrays) and `grpojax.models`.
"""

import importlib
from typing import Any

# Found when first used: whoever imports only a part that needs no JAX, such as
# a process that computes rewards, does not load it.
_NAMES = {
  "grpojax.core": ("advantages", "diagnostics", "losses"),
  "grpojax.core.logprobs": ("token_logprobs",),
  "grpojax.core.rollout": ("rollout",),
  "grpojax.core.sampling": ("Sampling",),
  "grpojax.core.step": (
    "init_state",
    "make_batch",
    "make_grpo_step",
    "rollout_metrics",
  ),
  "grpojax.core.types": (
    "LM",
    "Batch",
    "Prefix",
    "Prompts",
    "Rollout",
    "TrainState",
  ),
  "grpojax.core.update": ("make_update",),
  "grpojax.models.adapters": ("from_apply", "from_linen", "from_nnx"),
  "grpojax.models.transformer": ("TransformerConfig", "transformer"),
}
_MODULES = {name: module for module in _NAMES for name in _NAMES[module]}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
  if name in ("core", "models"):  # with the modules that are named above
    for module in _NAMES:
      importlib.import_module(module)
    value = importlib.import_module(f"grpojax.{name}")
  elif name in _NAMES["grpojax.core"]:
    value = importlib.import_module(f"grpojax.core.{name}")
  elif name in _MODULES:
    value = getattr(importlib.import_module(_MODULES[name]), name)
  else:
    raise AttributeError(f"module 'grpojax' has no attribute {name!r}")
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
