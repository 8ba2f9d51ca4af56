"""Estimates memory and seconds of a training step on an absent machine."""

import functools
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpojax.aot import chips, cost, hlo, programs, roofline, topology
from grpojax.aot.topology import Machine
from grpojax.core import meshes
from grpojax.models.config import parameter_shapes
from grpojax.models.sharding import shard_bytes

GIB = 2**30


class Part(NamedTuple):
  """Memory, operations, traffic and estimated time of a program on a device."""

  memory_bytes: int  # arguments, new results and temporaries
  temporary_bytes: int = 0
  flops: int = 0  # of matrix products
  bytes: int = 0  # read from HBM and written to it
  collective_bytes: int = 0  # sent to other chips
  token_loop_collective_bytes: int = 0  # part of them in the token loop
  collectives: dict[str, dict[str, int]] = {}  # bytes and runs, by kind
  seconds: float = 0.0  # estimate, without overlap
  token_loop_seconds: float = 0.0  # part of `seconds` in the token loop
  xla_seconds: float | None = None  # estimate from XLA's cycles
  untimed_seconds: float = 0.0  # part of both that has no cycles
  compile_seconds: float = 0.0
  error: str = ""  # reason for a failed compilation


def compile_part(
  lowered: jax.stages.Lowered, chip: chips.Chip, trips: int, runs: int = 1
) -> Part:
  """Compiles a program and estimates its costs.

  The token loop has `trips` iterations; the program runs `runs` times.
  """
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    # Out of memory: the message has the bytes that the program needs.
    used = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)", str(error))
    if used is None:
      raise
    memory = int(float(used[1]) * 2 ** (10 * " KMGT".index(used[2] or " ")))
    seconds = time.perf_counter() - start
    return Part(memory, compile_seconds=seconds, error="out of memory")
  compile_seconds = time.perf_counter() - start
  counted = cost.cost(hlo.parse(compiled.as_text()), trips, runs)
  estimate = roofline.estimate(counted, chip)
  memory = compiled.memory_analysis()
  arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
  arrays -= memory.alias_size_in_bytes
  return Part(
    memory_bytes=arrays + memory.temp_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    flops=counted.flops,
    bytes=counted.bytes,
    collective_bytes=counted.collective_bytes,
    token_loop_collective_bytes=counted.in_token_loop.collective_bytes,
    collectives=cost.by_kind(counted),
    compile_seconds=compile_seconds,
    **estimate._asdict(),
  )


def part_flops(run: programs.Run) -> dict[str, float]:
  """Counts the operations of each part of a step with full-length completions.

  Operations per token and parameter: 2 in a forward pass, 6 in training, 4 if
  frozen under adapters. Not counted: attention, adapters, the head on prompts.
  """
  model = run.policy.shape
  settings = run.settings
  loss = settings.loss
  update = settings.optim.update
  layers = 0  # parameters used per token
  for name, shape in parameter_shapes(model)["layers"].items():
    size = math.prod(shape) if len(shape) > 2 else 0  # a matrix per layer
    if name.startswith("expert_"):
      size = size * model.experts_per_token // model.experts
    layers += size
  completions = run.prompts * run.group_size * settings.sampling.max_new_tokens
  prompts = run.prompts * settings.data.max_prompt_length
  each = layers * (prompts + completions)
  each += model.vocab_size * model.width * completions
  # Forward passes before the update: for the reference, and for the policy
  off_policy = update.epochs * update.minibatches > 1
  before = run.ref_params is not None
  before += loss.old_logprobs == "trainer" and off_policy
  # A forward pass per epoch finds the highest entropies or the experts' load.
  whole_batch = loss.top_entropy_quantile < 1 or loss.router_aux_coef != 0
  trained = 4 if settings.lora.rank else 6
  trained += 2 * (whole_batch and update.micro_batches > 1)
  passes = {
    "rollout": 2,
    "reference": 2 * before,
    "update": trained * update.epochs,
  }
  return {name: float(n * each) for name, n in passes.items()}


def _cache_bytes(run: programs.Run) -> int:
  """Returns the bytes of the decode cache per device."""
  mesh = meshes.sampling_mesh(run.mesh, run.settings.mesh.sampling_tensor)
  model = run.policy.shape
  sampling = run.settings.sampling
  prompts = run.prompts // sampling.parts
  tokens = sampling.max_new_tokens

  def numbers(heads, size):  # per device and layer
    shape = prompts, run.group_size, heads, size
    sharding = meshes.activation_sharding(
      mesh, shape, "batch", "group", "kv_heads"
    )
    return math.prod(sharding.shard_shape(shape))

  size = jnp.dtype(run.settings.model.dtype).itemsize
  size = 1 if sampling.distribution.cache_dtype == "int8" else size
  size *= 2 * len(model.layers_with("k"))
  size *= numbers(model.kv_heads, tokens * model.head_dim)
  if model.linear:
    heads = model.linear.value_heads
    states = numbers(heads, model.linear.memory // heads)
    size += 4 * len(model.layers_with("linear_o")) * states
  return size


def _memory(run: programs.Run, name: str, part: Part) -> dict[str, int]:
  """Returns the bytes on a device while the program `name` runs, by kind."""
  frozen = run.policy.frozen
  params = shard_bytes(run.state.params) + shard_bytes(frozen)
  optimizer = shard_bytes(run.state.replace(params=None))
  reference = 0
  is_argument = name in ("reference", "step")
  on_device = run.settings.model.reference == "device"
  if run.ref_params is not None and (on_device or is_argument):
    reference = shard_bytes(run.ref_params)
  if part.error:  # XLA's figure includes the arguments
    arguments = params + (reference if is_argument else 0)
    arguments += optimizer if name in ("update", "step") else 0
    temporary = part.memory_bytes - arguments
  else:
    temporary = part.temporary_bytes
  kinds = {"parameters": params, "optimizer": optimizer, "reference": reference}
  large = 0  # bytes of the largest temporary
  if name == "rollout":
    kinds["cache"] = large = min(_cache_bytes(run), temporary)
  elif name in ("update", "step"):
    leaves = jax.tree.leaves(run.state.params)
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) for x in leaves]
    kinds["gradients"] = large = min(4 * sum(sizes), temporary)  # in float32
  return kinds | {"temporaries": temporary - large}


def measure(run: programs.Run, name: str, machine: Machine) -> dict[str, Any]:
  """Compiles the program `name` of a step; returns its entry in the report."""
  say = functools.partial(print, file=sys.stderr, flush=True)
  sampling = run.settings.sampling
  trips = max(sampling.max_new_tokens - 1, 1)
  # The rollout is compiled for a part of the prompts.
  runs = sampling.parts if name == "rollout" else 1
  say(f"compiling {name} ...")
  part = compile_part(programs.lower(run, name), machine.chip, trips, runs)
  say(f"compiling {name}: {part.compile_seconds:.0f} s")
  memory = _memory(run, name, part)
  total = sum(memory.values())
  limit = machine.chip.hbm_bytes
  return {
    **part._asdict(),
    "memory_bytes": total,
    "memory": memory,
    "fits": not part.error and total <= limit,
    "left_bytes": limit - total,
  }


def report(run: programs.Run, machine: Machine) -> dict[str, Any]:
  """Compiles all programs of a step; returns the report to save."""
  on_device = run.settings.reward.on_device
  names = ("step",) if on_device else ("rollout", "reference", "update")
  entries = {name: measure(run, name, machine) for name in names}
  seconds = sum(part["seconds"] for part in entries.values())
  samples = run.prompts * run.group_size
  tokens = samples * run.settings.sampling.max_new_tokens
  fits = all(part["fits"] for part in entries.values())
  mesh = dict(run.mesh.shape)
  sampling_tensor = run.settings.mesh.sampling_tensor or mesh["tensor"]
  result = {
    "fits": fits,
    "topology": machine.name,
    "logits_chunk": run.settings.optim.update.chunk_size,
    "mesh": mesh | {"sampling_tensor": sampling_tensor},
    "device_memory_bytes": machine.chip.hbm_bytes,
    "pool_bytes": chips.pool_bytes(machine.chip),
    "warning": topology.libtpu_warning(machine.name),
    "parts": entries,
    "step_seconds": seconds if fits else None,
  }
  by_xla = [part["xla_seconds"] for part in entries.values()]
  if fits and None not in by_xla:
    result["xla_step_seconds"] = sum(by_xla)
  if fits:
    result["tokens_per_second"] = tokens / seconds
    # Model-FLOPs utilisation (Chowdhery et al. 2022, appendix B): the model's
    # operations as a share of the devices' peak, without recomputation.
    peak = run.mesh.size * machine.chip.flops
    result["mfu"] = sum(part_flops(run).values()) / (seconds * peak)
  return result


def table(rows: Sequence[Sequence[str]]) -> list[str]:
  """Formats rows (title, *cells) as lines with aligned columns."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for title, *cells in rows:
    padded = (f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
    lines.append("  ".join([f"{title:<{widths[0]}}", *padded]))
  return lines


def _gib(size: float) -> str:
  return f"{size / GIB:.2f}"


def lines(result: dict[str, Any]) -> list[str]:
  """Formats a report as text."""
  entries = result["parts"]
  rows = [("", *entries)]

  def row(title, cell):
    rows.append((title, *(cell(entry) for entry in entries.values())))

  def kinds(key):  # of all programs, in order of appearance
    return dict.fromkeys(k for entry in entries.values() for k in entry[key])

  for kind in kinds("memory"):
    row(f"{kind}, GiB", lambda p, k=kind: _gib(p["memory"].get(k, 0)))
  row("memory per device, GiB", lambda p: _gib(p["memory_bytes"]))
  limit = _gib(result["device_memory_bytes"])
  row(f"left of {limit}, GiB", lambda p: _gib(p["left_bytes"]))
  row("TFLOP", lambda p: f"{p['flops'] / 1e12:.4g}")
  row("HBM traffic, GB", lambda p: f"{p['bytes'] / 1e9:.4g}")
  for kind in kinds("collectives"):
    sent = [p["collectives"].get(kind, {"bytes": 0}) for p in entries.values()]
    rows.append((f"{kind}, GB", *(f"{x['bytes'] / 1e9:.4g}" for x in sent)))
  in_loop = "token_loop_collective_bytes"
  row("sent in the token loop, GB", lambda p: f"{p[in_loop] / 1e9:.4g}")
  row("seconds, roofline", lambda p: f"{p['seconds']:.3g}")
  row("  of the token loop", lambda p: f"{p['token_loop_seconds']:.3g}")
  if any(p["xla_seconds"] is not None for p in entries.values()):
    row("seconds by XLA's cycles", lambda p: f"{p['xla_seconds'] or 0:.3g}")
    row("  without cycles, roofline", lambda p: f"{p['untimed_seconds']:.3g}")
  row("seconds to compile", lambda p: f"{p['compile_seconds']:.0f}")
  mesh = " ".join(f"{k}={v}" for k, v in result["mesh"].items())
  title = f"{result['topology']}, mesh {mesh}"
  title += f", logits_chunk {result['logits_chunk']}"
  warnings = filter(None, [result["warning"]])
  return [title, "", *table(rows), "", *warnings, *_verdict(result)]


def _verdict(result: dict[str, Any]) -> list[str]:
  if not result["fits"]:
    return [
      f"does not fit: {name} lacks {_gib(-entry['left_bytes'])} GiB of memory"
      for name, entry in result["parts"].items()
      if not entry["fits"]
    ]
  roofline = result["step_seconds"]
  slowest = result.get("xla_step_seconds", roofline)
  low, high = sorted((roofline, slowest))
  between = f"{low:.3g} to {high:.3g}" if slowest != roofline else f"{low:.3g}"
  verdict = [
    f"fits; a step takes about {between} s, by the roofline "
    f"{result['tokens_per_second']:.4g} tokens per second, "
    f"{result['mfu']:.1%} of peak (estimated: see grpojax/aot/roofline.py)"
  ]
  most = max(p["memory_bytes"] for p in result["parts"].values())
  if most > result["pool_bytes"]:
    verdict.append(
      "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: JAX takes "
      f"{_gib(result['pool_bytes'])} GiB of a GPU's memory otherwise"
    )
  return verdict
