"""Low-rank adapters: W + scale * A B in place of frozen matrices W.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv
2106.09685), equation 3. Only A [in, r] and B [r, out] are trained. B starts at
zero, so training starts from the base model. Without adapters the model is the
base, so a reference policy needs no second copy.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Key

from grpojax.core.random_keys import random_key, seed_key
from grpojax.core.types import LM, Params
from grpojax.models import huggingface as hf
from grpojax.models import layer_stacks
from grpojax.models.huggingface import weights, weights_out

# Matrices that may have adapters.
EXPERTS = ("expert_gate", "expert_up", "expert_down")
LINEAR = ("linear_qkv", "linear_z", "linear_b", "linear_a", "linear_o")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down", *LINEAR, *EXPERTS)


def targets_of(base: Params, targets: str) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the matrices that a pattern matches, by path.

  `targets` is a regular expression, matched in full against paths of `base`
  like "layers/q". ValueError if it is invalid, or matches nothing or an array
  that may not have adapters.
  """
  leaves = flatten_dict(base, sep="/")
  paths = [f"layers/{name}" for name in sorted(PROJECTIONS)]
  matrices = {path: leaves[path].shape for path in paths if path in leaves}
  try:
    chosen = [path for path in sorted(leaves) if re.fullmatch(targets, path)]
  except re.error as error:
    raise ValueError(f"lora.targets = {targets!r}: {error}") from None
  wrong = ", ".join(sorted(set(chosen) - set(matrices)))
  if wrong or not chosen:
    matched = f"{wrong}, not projections" if wrong else "nothing"
    raise ValueError(
      f"lora.targets = {targets!r}: they match {matched}; choose from "
      f"{', '.join(matrices)}"
    )
  return {path: matrices[path] for path in chosen}


def init(base: Params, key: Key[Array, ""], rank: int, targets: str) -> Params:
  """Draws float32 adapters of rank r = `rank` with A B = 0.

  A is uniform in +-1/sqrt(in), as in PEFT, and B is 0. `base` and `targets` are
  as in `targets_of`. Returns `{"layers": {"q": {"a": [L, in, r], "b":
  [L, r, out]}, ...}}`; experts have adapters [L, X, in, r] and [L, X, r, out].
  """
  if rank < 1:
    raise ValueError(f"rank={rank} must be 1 or more")
  layers = {}
  matrices = targets_of(base, targets)
  keys = jax.random.split(random_key(key), len(matrices))
  for key, (path, shape) in zip(keys, matrices.items(), strict=True):
    *stacked, fan_in, fan_out = shape
    bound = fan_in**-0.5
    a = jax.random.uniform(key, (*stacked, fan_in, rank), float, -bound, bound)
    b = jnp.zeros((*stacked, rank, fan_out))
    layers[path.removeprefix("layers/")] = {"a": a, "b": b}
  return {"layers": layers}


def abstract(base: Params, rank: int, targets: str) -> Params:
  """Returns the shapes and dtypes of the adapters from `init`."""
  draw = lambda base: init(base, seed_key(0), rank, targets)
  return jax.eval_shape(draw, base)


def attach(base: Params, adapters: Params, scale: int | float) -> Params:
  """Adds A and scale * B to the base's layers, under names like "q_lora_a"."""
  if not adapters:
    return base
  stacks = layer_stacks.stacks(adapters)  # several if `last_layers` split them
  sizes = [layer_stacks.layer_count(stack) for stack in stacks]
  attached = []
  parts = layer_stacks.split(base["layers"], sizes)
  for stack, layers in zip(stacks, parts, strict=True):
    low_rank = {f"{name}_lora_a": x["a"] for name, x in stack.items()}
    low_rank |= {f"{name}_lora_b": scale * x["b"] for name, x in stack.items()}
    attached.append(layers | low_rank)
  layers = tuple(attached) if len(attached) > 1 else attached[0]
  return base | {"layers": layers}


def adapt(lm: LM, base: Params, scale: int | float) -> LM:
  """Returns an `LM` whose parameters are adapters of a frozen base.

  Call it inside `jax.jit`, with `base` as an argument of the jitted function:
  then the policy and a reference without adapters (`{}`) share the base.
  `scale` is the factor of A B, PEFT's lora_alpha / r.
  """

  def attached(function):
    def run(adapters, *args, **options):
      return function(attach(base, adapters, scale), *args, **options)

    return run if function else None

  def prepare(params, longest, **formats):
    return lm.prepared(params, longest=longest, **formats)

  return lm._replace(
    init=lambda key: {},
    # The head has no adapter, so use that of the base.
    unembed=lambda adapters, hidden: lm.unembed(base, hidden),
    prepare=attached(prepare),  # returns attached parameters
    forward_mode=lm.forward_mode and adapt(lm.forward_mode, base, scale),
    prefill=attached(lm.prefill),
    extend=attached(lm.extend),
    forward=attached(lm.forward),
  )


@dataclasses.dataclass(frozen=True)
class Merged:
  """Stack of matrices W + scale A B in float32, computed when indexed."""

  base: Float[Array, "L *X m n"]
  a: Float[Array, "L *X m r"]
  b: Float[Array, "L *X r n"]
  scale: int | float
  dtype = jnp.dtype(jnp.float32)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the stack."""
    return self.base.shape

  def __getitem__(self, index: Any) -> Float[Array, "*L m n"]:
    """Returns the merged matrix of a layer, or of several layers."""
    base, a, b = (
      x[index].astype(jnp.float32) for x in (self.base, self.a, self.b)
    )
    high = jax.lax.Precision.HIGHEST
    return base + jnp.matmul(a, self.scale * b, precision=high)


def merge_lazily(
  base: Mapping[str, Any], adapters: Mapping[str, Any], scale: int | float
) -> dict[str, Any]:
  """Returns plain parameters, with adapters merged when indexed (`Merged`)."""
  layers = dict(base["layers"])
  for name, x in adapters.get("layers", {}).items():
    layers[name] = Merged(layers[name], x["a"], x["b"], scale)
  return {**base, "layers": layers}


def save_peft(
  path: str | pathlib.Path,
  adapters: Params,
  hf_config: dict[str, Any],
  alpha: int | float,
  base: str,
  revision: str | None = None,
  dtype: Any = None,
) -> None:
  """Writes adapters as the peft library does: A is [r, in], B is [out, r].

  `hf_config` is the config.json of the base model, `base` its path or name on
  the Hugging Face Hub, `revision` its commit there. `alpha` is PEFT's
  lora_alpha: the scale is alpha / r. `dtype` is the dtype to store; None keeps
  the adapters' dtype. ValueError if `path` exists, if there are no adapters, or
  if peft 0.21 cannot read them (for experts: down alone, or all three, and none
  of Qwen3.5; parts of stored matrices: none).
  """
  if not adapters:
    raise ValueError("there are no adapters to save")
  expert_names = set(EXPERTS) & set(adapters["layers"])
  if expert_names not in (set(), {"expert_down"}, set(EXPERTS)):
    raise ValueError(
      f"peft reads no adapters of {' and '.join(sorted(expert_names))} alone: "
      f"use {', '.join(EXPERTS)} in lora.targets, or write merged weights"
    )
  flat = flatten_dict(adapters, sep="/")
  base_layout = hf.layout(hf_config)
  # transformers stacks experts in memory; peft converts those of two families.
  if expert_names and "layers/shared_gate" in base_layout:
    raise ValueError(
      f"peft ignores adapters of {', '.join(sorted(expert_names))} in Qwen3.5: "
      "write merged weights, or leave these out of lora.targets"
    )
  joined = [x for x in adapters["layers"] if base_layout[f"layers/{x}"].part]
  if joined:
    raise ValueError(
      f"peft reads no adapters of {', '.join(sorted(joined))}: the base stores "
      "these matrices as parts of others. Write merged weights, or leave these "
      "out of lora.targets"
    )
  layout = {}
  modules = set()
  # Name the two tensors of each adapter after the matrix in the base's files.
  for leaf_path, array in sorted(flat.items()):
    target, side = leaf_path.rsplit("/", 1)
    stored = base_layout[target]
    matrices = [x.removesuffix(".weight") for x in stored.names]
    suffix = f"lora_{side.upper()}.weight"
    names = tuple(f"base_model.model.{x}.{suffix}" for x in matrices)
    layout[leaf_path] = weights.Leaf(names, array.shape, stored.stacked, True)
    # PEFT matches modules by their last name, like "q_proj".
    modules.add(matrices[0].rpartition(".")[2])
  peft_config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "revision": revision,
    # The first array is an A, [.., in, r].
    "r": int(next(iter(flat.values())).shape[-1]),
    "lora_alpha": alpha,
    "target_modules": sorted(modules),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }
  with weights_out.new_directory(path) as partial:
    (partial / hf.ADAPTER).write_text(json.dumps(peft_config, indent=2) + "\n")
    file = "adapter_model.safetensors"
    weights_out.write(partial, layout, flat, dtype, single=file)
