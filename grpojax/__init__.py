"""GRPO for JAX: the group is an array axis.

`grpojax.NAME` is a shortcut to the main functions of `grpojax.core` (GRPO as
pure functions of arrays), `grpojax.statistics` and `grpojax.models`.
"""

import importlib
import os
import sys
from typing import Any

# Import each module on first use, because reward workers do not need JAX.
_NAMES = {
  "grpojax.core": "advantages losses",
  "grpojax.core.arguments": "check_prompts prompts_from_left_padded",
  "grpojax.core.batch": "make_batch",
  "grpojax.core.environment": "Environment Observation returns",
  "grpojax.core.logprobs": "token_logprobs",
  "grpojax.core.meshes": "constrain make_mesh shardings",
  "grpojax.core.rollout": "rollout rollout_metrics",
  "grpojax.core.objective": "Objective",
  "grpojax.core.decoding.sampling": "Sampling",
  "grpojax.core.step": "init_state make_grpo_step",
  "grpojax.core.types": "LM Batch Prefix Prompts Rollout Tokens TrainState",
  "grpojax.core.turns": "Segment trajectories",
  "grpojax.core.update": (
    "UpdateOptions apply_gradients make_gradients make_update"
  ),
  "grpojax.statistics": "diagnostics",
  "grpojax.models.adapters": "check_causal from_apply from_linen from_nnx",
  "grpojax.models.transformer": "TransformerConfig transformer",
}
_MODULES = {
  name: module for module, names in _NAMES.items() for name in names.split()
}

__all__ = sorted(_MODULES)


def _is_program() -> bool:
  """Returns True if started as `grpojax` or `python -m grpojax[.NAME]`."""
  words = sys.orig_argv
  if "-m" in words:
    module = words[words.index("-m") + 1 :][:1]
    return bool(module) and module[0].split(".")[0] == "grpojax"
  return os.path.basename("".join(sys.argv[:1])) == "grpojax"


# Handle Ctrl-C before the imports, which take most of the start-up time.
if _is_program():
  importlib.import_module("grpojax.runtime.processes.interrupts").begin()


def __getattr__(name: str) -> Any:
  if name in ("core", "models", "statistics"):  # import their modules too
    for module in _NAMES:
      importlib.import_module(module)
    value = importlib.import_module(f"grpojax.{name}")
  elif name in _MODULES:
    module = _MODULES[name]
    if module.count(".") == 1:  # a package that contains the module `name`
      value = importlib.import_module(f"{module}.{name}")
    else:
      value = getattr(importlib.import_module(module), name)
  else:
    raise AttributeError(f"module 'grpojax' has no attribute {name!r}")
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
