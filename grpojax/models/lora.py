"""Low-rank adapters: W + scale * A B in the place of frozen matrices W.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv
2106.09685), equation 3. Only A [in, r] and B [r, out] are parameters of the
adapted model. B starts at zero, so it starts as the base; and with no adapters
it is the base, so a reference policy needs no second copy of it.
"""

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key

from grpojax.core.types import LM, Params
from grpojax.models import hf, layer_stacks, weights, weights_out
from grpojax.models.merged import merged_matrix

# What the decoder multiplies by, and can add an adapter to.
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Of PEFT's settings, those that would change what the adapters compute.
_REFUSED = (
  "use_dora",
  "rank_pattern",
  "alpha_pattern",
  "modules_to_save",
  "fan_in_fan_out",
  "lora_bias",
)


def targets_of(base: Params, targets: str) -> dict[str, tuple[int, ...]]:
  """The matrices that a pattern names, with their shapes [L, in, out].

  Args:
    base: parameters, or their shapes.
    targets: regular expression, matched in full against paths like "layers/q".

  Raises:
    ValueError: it is no regular expression, matches nothing, or something
      that cannot be adapted.
  """
  leaves = sorted(flatten_dict(base, sep="/").items())
  shapes = {path: leaf.shape for path, leaf in leaves}
  matrices = {
    path: shape
    for path, shape in shapes.items()
    if path in {f"layers/{name}" for name in PROJECTIONS} and len(shape) == 3
  }
  try:
    chosen = [path for path in shapes if re.fullmatch(targets, path)]
  except re.error as error:
    raise ValueError(f"targets {targets!r}: {error}") from None
  others = sorted(set(chosen) - set(matrices))
  if not chosen or others:
    matched = f"{', '.join(others)}, no projections" if others else "nothing"
    raise ValueError(
      f"targets {targets!r} match {matched}; there are {', '.join(matrices)}"
    )
  return {path: matrices[path] for path in chosen}


def init(base: Params, key: Key[Array, ""], rank: int, targets: str) -> Params:
  """Draws float32 adapters that change nothing yet.

  Args:
    base: parameters of a `transformer`, or their shapes.
    key: for A, uniform in +-1/sqrt(in) as in PEFT (Kaiming's with a = sqrt 5).
    rank: r.
    targets: see `targets_of`.

  Returns:
    `{"layers": {"q": {"a": [L, in, r], "b": [L, r, out]}, ...}}`, b = 0.

  Raises:
    ValueError: rank < 1, or as `targets_of`.
  """
  if rank < 1:
    raise ValueError(f"rank={rank} must be 1 or more")
  matrices, layers = targets_of(base, targets), {}
  keys = jax.random.split(key, len(matrices))
  for key, (path, shape) in zip(keys, matrices.items(), strict=True):
    count, fan_in, fan_out = shape
    bound = fan_in**-0.5
    a = jax.random.uniform(
      key, (count, fan_in, rank), minval=-bound, maxval=bound
    )
    name = path.removeprefix("layers/")
    layers[name] = {"a": a, "b": jnp.zeros((count, rank, fan_out))}
  return {"layers": layers}


def abstract(base: Params, rank: int, targets: str) -> Params:
  """Shapes and dtypes of adapters, see `init`."""
  return jax.eval_shape(
    lambda base: init(base, jax.random.key(0), rank, targets), base
  )


def attach(base: Params, adapters: Params, scale: int | float) -> Params:
  """The base with A and scale * B beside their matrices, for the decoder.

  Args:
    base: parameters, with their layers in one stack.
    adapters: from `init`; their layers may be in several stacks, as
      `transformer.last_layers` makes them.
    scale: of A B.

  Returns:
    Parameters, with their layers in as many stacks as the adapters'.
  """
  if not adapters:
    return base
  stacks, attached = layer_stacks.stacks(adapters), []
  sizes = map(layer_stacks.layer_count, stacks)
  of_base = layer_stacks.split(base["layers"], list(sizes))
  for stack, layers in zip(stacks, of_base, strict=True):
    low_rank = {f"{name}_lora_a": x["a"] for name, x in stack.items()}
    low_rank |= {f"{name}_lora_b": scale * x["b"] for name, x in stack.items()}
    attached.append(layers | low_rank)
  layers = tuple(attached) if len(attached) > 1 else attached[0]
  return base | {"layers": layers}


def adapt(lm: LM, base: Params, scale: int | float) -> LM:
  """The model whose parameters are adapters of a frozen base.

  Call it inside `jax.jit`, with `base` an argument of the jitted function: then
  policy and reference (its adapters are `{}`) share one base in memory.

  Args:
    lm: a `transformer`.
    base: its parameters.
    scale: of A B; PEFT's lora_alpha / r.

  Returns:
    An LM. Its `init` gives `{}`, the base itself; see `lora.init`.
  """

  def prefill(adapters, prompt_ids, prompt_mask):
    return lm.prefill(attach(base, adapters, scale), prompt_ids, prompt_mask)

  def extend(adapters, prefix, ids, cache=None, positions=None, segments=None):
    params = attach(base, adapters, scale)
    return lm.extend(params, prefix, ids, cache, positions, segments)

  def forward(adapters, *args, **where):
    return lm.forward(attach(base, adapters, scale), *args, **where)

  def forward_with_load(adapters, *args, **where):
    params = attach(base, adapters, scale)
    return lm.forward_with_load(params, *args, **where)

  def unembed(adapters, hidden):
    return lm.unembed(base, hidden)

  def prepare(adapters, longest):  # then of a plain model
    return lm.prepared(attach(base, adapters, scale), longest=longest)

  return lm._replace(
    init=lambda key: {},
    prefill=prefill,
    extend=extend,
    unembed=unembed,
    prepare=prepare,
    forward=lm.forward and forward,
    forward_with_load=lm.forward_with_load and forward_with_load,
  )


def merge(base: Params, adapters: Params, scale: int | float) -> Params:
  """Parameters of a plain model that computes what the adapted one does.

  Args:
    base: parameters; they are not modified.
    adapters: from `init`, trained.
    scale: as in `adapt`.

  Returns:
    Parameters in the base's dtype; the products are computed in float32.
  """
  layers = dict(base["layers"])
  for name, low_rank in adapters.get("layers", {}).items():
    whole = merged_matrix(layers[name], low_rank["a"], low_rank["b"], scale)
    layers[name] = whole.astype(layers[name].dtype)
  return base | {"layers": layers}


def _names(base: weights.Leaf, side: str) -> tuple[str, ...]:
  """PEFT's names of A ("a") or B ("b") beside the matrices of a leaf."""
  end = f".lora_{side.upper()}.weight"
  return tuple(
    f"base_model.model.{name.removesuffix('.weight')}{end}"
    for name in base.names
  )


def _layout(
  hf_config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, weights.Leaf]:
  """How PEFT stores adapters: A as [r, in], B as [out, r]."""
  base, leaves = hf.layout(hf_config), {}
  for path, shape in shapes.items():
    target, side = path.rsplit("/", 1)
    names = _names(base[target], side)
    leaves[path] = weights.Leaf(names, tuple(shape), 1, True)
  return leaves


def save_peft(
  path: str | pathlib.Path,
  adapters: Params,
  source: str | pathlib.Path,
  alpha: int | float,
  dtype: Any = None,
  base: str = "",
  revision: str | None = None,
) -> None:
  """Writes adapters as the peft library does.

  Args:
    path: the directory to make; nothing stands there until all is written.
    adapters: from `init`, trained.
    source: directory or embedded name of the base model.
    alpha: PEFT's lora_alpha; the scale is alpha / r.
    dtype: to store; None is that of the adapters.
    base: what the file calls the base model; "" is `source`.
    revision: of it, where it is a name of the Hugging Face Hub.

  Raises:
    ValueError: `path` exists already, or there are no adapters.
  """
  if not adapters:
    raise ValueError("there are no adapters to save")
  flat = flatten_dict(adapters, sep="/")
  shapes = {path: array.shape for path, array in sorted(flat.items())}
  layout = _layout(hf.read_config(source), shapes)
  modules = {leaf.names[0].split(".")[-3] for leaf in layout.values()}
  peft_config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base or str(source),
    "revision": revision,
    "r": int(next(iter(flat.values())).shape[-1]),
    "lora_alpha": alpha,
    "target_modules": sorted(modules),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }
  with weights_out.new_directory(path) as partial:
    (partial / CONFIG).write_text(json.dumps(peft_config, indent=2) + "\n")
    weights_out.write(partial, layout, flat, dtype, single=WEIGHTS)


def load_peft(
  path: str | pathlib.Path, source: str | pathlib.Path
) -> tuple[Params, float]:
  """Reads adapters that the peft library, or `save_peft`, wrote.

  Args:
    path: holds adapter_config.json and adapter_model.safetensors.
    source: directory or embedded name of the base model.

  Returns:
    Float32 adapters, and their scale (`adapt`, `merge`).

  Raises:
    ValueError: settings that are not supported, damaged files, or tensors
      that do not fit the base.
  """
  path = pathlib.Path(path)
  peft_config = weights.read_json(path / CONFIG)
  refused = [name for name in _REFUSED if peft_config.get(name)]
  refused += ["peft_type"] if peft_config.get("peft_type") != "LORA" else []
  refused += ["bias"] if peft_config.get("bias", "none") != "none" else []
  if refused:
    text = ", ".join(f"{name}={peft_config.get(name)!r}" for name in refused)
    raise ValueError(f"{path / CONFIG}: {text} is not supported")
  tensors, rank = weights.header(path / WEIGHTS), peft_config["r"]
  hf_config, shapes = hf.read_config(source), {}
  base = hf.layout(hf_config)
  any_projection = f"layers/({'|'.join(PROJECTIONS)})"
  adaptable = targets_of(hf.abstract_params(hf_config), any_projection)
  for target, (count, fan_in, fan_out) in adaptable.items():
    if not tensors.keys().isdisjoint(_names(base[target], "a")):
      shapes[f"{target}/a"] = (count, fan_in, rank)
      shapes[f"{target}/b"] = (count, rank, fan_out)
  layout = _layout(hf_config, shapes)
  weights.check(path, layout, tensors)
  flat = {
    name: weights.read(leaf, tensors, jnp.float32)
    for name, leaf in layout.items()
  }
  root = rank**0.5 if peft_config.get("use_rslora") else rank
  return unflatten_dict(flat, sep="/"), peft_config["lora_alpha"] / root
