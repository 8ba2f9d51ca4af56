"""A training step on a machine that need not be there: memory and seconds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.aot import chips, parts, programs, topology
from grpojax.aot.chips import Chip
from grpojax.aot.parts import Part
from grpojax.aot.topology import Machine
from grpojax.core import mesh as mesh_lib
from grpojax.models.config import TransformerConfig, parameter_shapes
from grpojax.models.sharding import shard_bytes

Say = Callable[[str], None]
GIB = 2**30


def active_parameters(model: TransformerConfig) -> tuple[int, int]:
  """Counts the parameters that a token is multiplied with: layers, and head.

  Of experts the few that a token goes to.
  """
  shapes, total = parameter_shapes(model), 0
  for name, shape in shapes["layers"].items():
    size = math.prod(shape) if len(shape) > 2 else 0  # a matrix of each layer
    if name.startswith("expert_"):
      size = size * model.experts_per_token // model.experts
    total += size
  return total, model.vocab_size * model.width


def forward_passes(run: programs.Run) -> tuple[int, int]:
  """Counts forward passes without a gradient: before the update, and in it.

  Before it: log-probabilities of a reference, and of the policy where
  `loss.old_logprobs` asks for them. In it, in each epoch: one pass to find the
  tokens of highest entropy among those of all micro-batches, and how all of
  them load a mixture's experts.
  """
  settings, update = run.settings, run.settings.optim.update
  off_policy = update.epochs * update.minibatches > 1
  before = int(run.ref_params is not None)
  before += int(settings.loss.old_logprobs == "trainer" and off_policy)
  of_all = (
    settings.loss.top_entropy_quantile < 1 or settings.loss.router_aux_coef
  )
  return before, int(bool(of_all) and update.micro_batches > 1)


def part_flops(run: programs.Run) -> dict[str, float]:
  """Counts the operations of each part of a step, completions of full length.

  Forward 2 a parameter and token, trained 6, of frozen weights below adapters
  4: they have no gradient of their own. Once for each of sampling, the
  `forward_passes` and an epoch of the update. Prompts need no output head.
  Without attention, and without the adapters themselves.
  """
  settings, update = run.settings, run.settings.optim.update
  layers, head = active_parameters(run.model)
  completions = run.prompts * run.group_size * settings.sampling.max_new_tokens
  prompts = run.prompts * settings.data.max_prompt_length
  before, within = forward_passes(run)
  trained = 4 if settings.lora.rank else 6
  passes = {
    "rollout": 2,
    "reference": 2 * before,
    "update": (trained + 2 * within) * update.epochs,
  }
  each = layers * (prompts + completions) + head * completions
  return {name: float(n * each) for name, n in passes.items()}


def model_flops(run: programs.Run) -> float:
  """Number of operations that a step needs: the sum of `part_flops`."""
  return sum(part_flops(run).values())


def _cache_bytes(run: programs.Run) -> int:
  """Bytes of the decode cache, a device."""
  mesh = mesh_lib.sampling_mesh(run.mesh, run.settings.mesh.sampling_tensor)
  model, sampling = run.model, run.settings.sampling
  prompts, tokens = run.prompts // sampling.parts, sampling.max_new_tokens
  shape = prompts, run.group_size, model.kv_heads, tokens, model.head_dim
  sharding = mesh_lib.activation_sharding(
    mesh, shape, "batch", "group", "kv_heads"
  )
  size = jnp.dtype(run.settings.model.dtype).itemsize
  size = 1 if sampling.distribution.cache_dtype == "int8" else size
  return 2 * model.layers * size * math.prod(sharding.shard_shape(shape))


def _memory(run: programs.Run, name: str, part: Part) -> dict[str, int]:
  """Bytes on a device while the program of this name runs, by their kind."""
  frozen = run.policy.frozen
  params = shard_bytes(run.state.params) + shard_bytes(frozen)
  rest = run.state.replace(params=None)
  optimizer, reference = shard_bytes(rest), 0
  is_argument = name in ("reference", "step")  # programs that take it
  on_device = run.settings.model.reference == "device"
  if run.ref_params is not None and (on_device or is_argument):
    reference = shard_bytes(run.ref_params)
  if part.error:  # XLA's figure, of arguments and all
    arguments = params + (reference if is_argument else 0)
    arguments += optimizer if name in ("update", "step") else 0
    temporary = part.memory_bytes - arguments
  else:
    temporary = part.temporary_bytes
  of_which = {}
  if name == "rollout":
    of_which["cache"] = min(_cache_bytes(run), temporary)
  elif name in ("update", "step"):
    leaves = jax.tree.leaves(run.state.params)
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) for x in leaves]
    of_which["gradients"] = min(4 * sum(sizes), temporary)  # in float32
  return {
    "parameters": params,
    "optimizer": optimizer,
    "reference": reference,
    **of_which,
    "temporaries": temporary - sum(of_which.values()),
  }


def _part(
  run: programs.Run, name: str, part: Part, chip: Chip
) -> dict[str, Any]:
  """Entry of a program in the report, with all memory that is in use then."""
  memory = _memory(run, name, part)
  total, limit = sum(memory.values()), chips.device(chip).hbm_bytes
  return {
    **part._asdict(),
    "memory_bytes": total,
    "memory": memory,
    "fits": not part.error and total <= limit,
    "left_bytes": limit - total,
  }


def measure(
  run: programs.Run, name: str, machine: Machine, say: Say
) -> dict[str, Any]:
  """Compiles the program of a step with this name; its entry in the report."""
  sampling = run.settings.sampling
  trips = max(sampling.max_new_tokens - 1, 1)
  # The rollout is compiled for one part of the prompts.
  runs = sampling.parts if name == "rollout" else 1
  say(f"compiling {name} ...")
  part = parts.measure(programs.lower(run, name), machine.chip, trips, runs)
  say(f"compiling {name}: {part.compile_seconds:.0f} s")
  return _part(run, name, part, machine.chip)


def report(run: programs.Run, machine: Machine, say: Say) -> dict[str, Any]:
  """Makes the report of all programs, as it is saved."""
  entries = {
    name: measure(run, name, machine, say)
    for name in programs.names(run.settings)
  }
  seconds = sum(part["seconds"] for part in entries.values())
  samples = run.prompts * run.group_size
  tokens = samples * run.settings.sampling.max_new_tokens
  _, count = topology.parse(machine.name)
  fits = all(part["fits"] for part in entries.values())
  mesh = dict(run.mesh.shape)
  sampling_tensor = run.settings.mesh.sampling_tensor or mesh["tensor"]
  result = {
    "fits": fits,
    "topology": machine.name,
    "mesh": mesh | {"sampling_tensor": sampling_tensor},
    "device_memory_bytes": chips.device(machine.chip).hbm_bytes,
    "pool_bytes": int(machine.chip.pool * chips.device(machine.chip).hbm_bytes),
    "parts": entries,
    "step_seconds": seconds if fits else None,
  }
  by_xla = [part["xla_seconds"] for part in entries.values()]
  if fits and None not in by_xla:
    result["xla_step_seconds"] = sum(by_xla)
  if fits:
    result["tokens_per_second"] = tokens / seconds
    # Model-FLOPs utilisation (Chowdhery et al. 2022, appendix B): the share of
    # the chips' peak that the model needs, whatever is computed again.
    peak = count * machine.chip.flops
    result["mfu"] = model_flops(run) / (seconds * peak)
  return result


def table(rows: Sequence[Sequence[str]]) -> list[str]:
  """Writes rows of a title and cells as lines, in columns."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for title, *cells in rows:
    padded = (f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
    lines.append("  ".join([f"{title:<{widths[0]}}", *padded]))
  return lines


def _gib(size: float) -> str:
  return f"{size / GIB:.2f}"


def _gb(size: float) -> str:
  return f"{size / 1e9:.4g}"


def lines(result: dict[str, Any]) -> list[str]:
  """Writes a report for people."""
  entries = result["parts"]
  rows = [("", *entries)]

  def row(title, cell):
    rows.append((title, *(cell(entry) for entry in entries.values())))

  def kinds(key):  # of all programs, in the order of the first that has them
    return dict.fromkeys(k for entry in entries.values() for k in entry[key])

  for kind in kinds("memory"):
    row(f"{kind}, GiB", lambda p, k=kind: _gib(p["memory"].get(k, 0)))
  row("memory a device, GiB", lambda p: _gib(p["memory_bytes"]))
  limit = _gib(result["device_memory_bytes"])
  row(f"left of {limit}, GiB", lambda p: _gib(p["left_bytes"]))
  row("TFLOP", lambda p: f"{p['flops'] / 1e12:.4g}")
  row("HBM traffic, GB", lambda p: _gb(p["bytes"]))
  nothing = {"bytes": 0}
  for kind in kinds("collectives"):
    row(
      f"{kind}, GB",
      lambda p, k=kind: _gb(p["collectives"].get(k, nothing)["bytes"]),
    )
  row(
    "sent in the token loop, GB",
    lambda p: _gb(p["token_loop_collective_bytes"]),
  )
  row("seconds, roofline", lambda p: f"{p['seconds']:.3g}")
  row("  of the token loop", lambda p: f"{p['token_loop_seconds']:.3g}")
  if any(p["xla_seconds"] is not None for p in entries.values()):
    row("seconds by XLA's cycles", lambda p: f"{p['xla_seconds'] or 0:.3g}")
  row("seconds to compile", lambda p: f"{p['compile_seconds']:.0f}")
  mesh = " ".join(f"{k}={v}" for k, v in result["mesh"].items())
  title = f"{result['topology']}, mesh {mesh}"
  return [title, "", *table(rows), "", *_verdict(result)]


def _verdict(result: dict[str, Any]) -> list[str]:
  if not result["fits"]:
    return [
      f"does not fit: {name} takes {_gib(-entry['left_bytes'])} GiB too much"
      for name, entry in result["parts"].items()
      if not entry["fits"]
    ]
  roofline = result["step_seconds"]
  slowest = result.get("xla_step_seconds", roofline)
  low, high = sorted((roofline, slowest))
  between = f"{low:.3g} to {high:.3g}" if slowest != roofline else f"{low:.3g}"
  verdict = [
    f"fits; a step takes about {between} s, by the roofline "
    f"{result['tokens_per_second']:.4g} tokens a second, "
    f"{result['mfu']:.1%} of peak (estimated: see grpojax/aot/roofline.py)"
  ]
  most = max(p["memory_bytes"] for p in result["parts"].values())
  if most > result["pool_bytes"]:
    verdict.append(
      "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: JAX takes "
      f"{_gib(result['pool_bytes'])} GiB of a GPU's memory otherwise"
    )
  return verdict
