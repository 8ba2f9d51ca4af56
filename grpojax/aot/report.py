"""A training step on a machine that need not be there: memory and seconds."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from grpojax.aot import chips, parts, programs, roofline, topology
from grpojax.aot.chips import Chip
from grpojax.aot.parts import Part
from grpojax.core import mesh as mesh_lib
from grpojax.models.config import TransformerConfig, parameter_shapes
from grpojax.models.sharding import shard_bytes
from grpojax.training import from_config

Say = Callable[[str], None]
GIB = 2**30


def active_parameters(model: TransformerConfig) -> tuple[int, int]:
  """Parameters that a token is multiplied with.

  Returns:
    Those of the layers' matrices, of experts the few that a token goes to, and
    those of the output head.
  """
  shapes, total = parameter_shapes(model), 0
  for name, shape in shapes["layers"].items():
    size = math.prod(shape) if len(shape) > 2 else 0  # a matrix of each layer
    if name.startswith("expert_"):
      size = size * model.experts_per_token // model.experts
    total += size
  return total, model.vocab_size * model.width


def forward_passes(run: programs.Run) -> tuple[int, int]:
  """Over all completions, without a gradient: before the update, and in it.

  Scoring by a reference, and by the policy where `loss.old_logprobs` asks for
  it; in each epoch, to find the tokens of highest entropy among those of all
  micro-batches, and how all of them load a mixture's experts.
  """
  config, optim = run.config, run.config.optim
  off_policy = optim.epochs * optim.minibatches > 1
  scored = run.ref_params is not None
  scored += from_config.recompute_logprobs(config) and off_policy
  found = config.loss.top_entropy_quantile < 1 or config.loss.router_aux_coef
  return int(scored), int(bool(found) and optim.micro_batches > 1)


def part_flops(run: programs.Run) -> dict[str, float]:
  """Operations that each part of a step needs, completions of full length.

  Forward 2 a parameter and token, trained 6, of frozen weights below adapters
  4: they have no gradient of their own. Once for each of sampling, the
  `forward_passes` and an epoch of the update. Prompts need no output head.
  Without attention, and without the adapters themselves.
  """
  config, optim = run.config, run.config.optim
  layers, head = active_parameters(run.model)
  completions = run.prompts * run.group_size * config.sampling.max_new_tokens
  prompts = run.prompts * config.data.max_prompt_length
  before, within = forward_passes(run)
  trained = 4 if config.lora.rank else 6
  passes = {
    "rollout": 2,
    "reference": 2 * before,
    "update": (trained + 2 * within) * optim.epochs,
  }
  each = layers * (prompts + completions) + head * completions
  return {name: float(n * each) for name, n in passes.items()}


def model_flops(run: programs.Run) -> float:
  """Operations that a step needs: the sum of `part_flops`."""
  return sum(part_flops(run).values())


def _cache_bytes(run: programs.Run) -> int:
  """Of the decode cache, a device."""
  mesh = mesh_lib.sampling_mesh(run.mesh, run.config.mesh.sampling_tensor)
  model, sampling = run.model, run.config.sampling
  prompts, tokens = run.prompts // sampling.parts, sampling.max_new_tokens
  at_once = min(sampling.slots or run.group_size, run.group_size)
  shape = prompts, at_once, model.kv_heads, tokens, model.head_dim
  names = ("batch", "group", "kv_heads")
  place = mesh_lib.activation_sharding(mesh, shape, *names)
  size = jnp.dtype(run.config.model.dtype).itemsize
  return 2 * model.layers * size * math.prod(place.shard_shape(shape))


def _memory(run: programs.Run, name: str, part: Part) -> dict[str, int]:
  """What a device holds while a program runs, by what it is.

  Args:
    run: from `programs.open_run`.
    name: of the program.
    part: what it needs by itself.
  """
  frozen = run.policy.frozen
  params = shard_bytes(run.state.params) + shard_bytes(frozen)
  rest = run.state.replace(params=None)
  optimizer, reference = shard_bytes(rest), 0
  scores = name in ("reference", "step")  # what is given the reference
  if run.ref_params is not None:
    on_device = run.config.model.reference == "device"
    reference = shard_bytes(run.ref_params) * (on_device or scores)
  if part.error:  # XLA's figure, of arguments and all
    given = params + reference * scores
    given += optimizer if name in ("update", "step") else 0
    temporary = part.memory_bytes - given
  else:
    temporary = part.temporary_bytes
  own = {"update": "gradients", "rollout": "cache", "step": "gradients"}
  of_which = {}
  if name in own:
    size = (
      _cache_bytes(run)
      if name == "rollout"
      else _float32_bytes(run.state.params)
    )
    of_which[own[name]] = min(size, temporary)
  return {
    "parameters": params,
    "optimizer": optimizer,
    "reference": reference,
    **of_which,
    "temporaries": temporary - sum(of_which.values()),
  }


def _float32_bytes(params: PyTree) -> int:
  return shard_bytes(
    jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding),
      params,
    )
  )


def _part(run: programs.Run, name: str, part: Part, chip: Chip):
  """A program in the report: what it needs with what is there beside it."""
  memory = _memory(run, name, part)
  total, limit = sum(memory.values()), chips.device(chip).hbm_bytes
  return {
    **dataclasses.asdict(part),
    "memory_bytes": total,
    "memory": memory,
    "fits": not part.error and total <= limit,
    "left_bytes": limit - total,
  }


def measure(
  run: programs.Run, name: str, machine: str, chip: Chip, say: Say
) -> dict[str, Any]:
  """Compiles one program of a step.

  Args:
    run: from `programs.open_run`.
    name: of the program.
    machine: name of the topology.
    chip: its chip.
    say: told what is being done.

  Returns:
    Its part of the report.
  """
  sampling = run.config.sampling
  trips = max(sampling.max_new_tokens - 1, 1)
  say(f"compiling {name} ...")
  lowered = programs.lower(run, name)
  part, kept = parts.measure(lowered, machine, chip, trips)
  seconds = f"{part.compile_seconds:.0f} s"
  say(f"compiling {name}: {seconds}{' (kept from before)' if kept else ''}")
  if name == "rollout":  # which was compiled for one part of the prompts
    part = parts.repeated(part, sampling.parts)
  return _part(run, name, part, chip)


def report(
  run: programs.Run, machine: str, chip: Chip, say: Say
) -> dict[str, Any]:
  """All of it, as it is saved; arguments as of `measure`."""
  found = {
    name: measure(run, name, machine, chip, say)
    for name in programs.names(run.config)
  }
  seconds = sum(part["seconds"] for part in found.values())
  samples = run.prompts * run.group_size
  tokens = samples * run.config.sampling.max_new_tokens
  _, count = topology.parse(machine)
  fits = all(part["fits"] for part in found.values())
  speed = {}
  if fits:
    speed = {
      "step_seconds": seconds,
      "tokens_per_second": tokens / seconds,
      "mfu": roofline.mfu(model_flops(run), seconds, count, chip),
    }
  return {
    "fits": fits,
    "topology": machine,
    "mesh": {axis: run.mesh.shape[axis] for axis in mesh_lib.AXES}
    | {
      "sampling_tensor": run.config.mesh.sampling_tensor
      or run.mesh.shape["tensor"]
    },
    "micro_batches": run.config.optim.micro_batches,
    "remat": run.config.model.remat,
    "device_memory_bytes": chips.device(chip).hbm_bytes,
    "parts": found,
    "step_seconds": None,
    **speed,
  }


def _gib(size: float) -> str:
  return f"{size / GIB:.2f}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
  """Writes rows of a title and cells as lines, in columns."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for title, *cells in rows:
    padded = (f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
    lines.append("  ".join([f"{title:<{widths[0]}}", *padded]))
  return lines


def lines(found: dict[str, Any]) -> list[str]:
  """A report for people."""
  every = found["parts"]
  mesh = " ".join(f"{k}={v}" for k, v in found["mesh"].items())
  out = [f"{found['topology']}, mesh {mesh}", ""]
  rows = [("", *every)]
  kinds = dict.fromkeys(k for part in every.values() for k in part["memory"])
  for kind in kinds:
    cells = (_gib(part["memory"].get(kind, 0)) for part in every.values())
    rows.append((f"{kind}, GiB", *cells))

  def row(title, cell):
    rows.append((title, *(cell(part) for part in every.values())))

  row("memory a device, GiB", lambda p: _gib(p["memory_bytes"]))
  limit = _gib(found["device_memory_bytes"])
  row(f"left of {limit}, GiB", lambda p: _gib(p["left_bytes"]))
  row("TFLOP", lambda p: f"{p['flops'] / 1e12:.4g}")
  row("HBM traffic, GB", lambda p: f"{p['bytes'] / 1e9:.4g}")
  kinds = dict.fromkeys(k for p in every.values() for k in p["collectives"])
  for kind in kinds:
    row(
      f"{kind}, GB",
      lambda p, k=kind: _sent(p["collectives"].get(k, {"bytes": 0})["bytes"]),
    )
  row(
    "sent in the token loop, GB",
    lambda p: _sent(p["token_loop_collective_bytes"]),
  )
  row("seconds, estimated", lambda p: f"{p['seconds']:.3g}")
  row("  if all overlaps", lambda p: f"{p['overlapped_seconds']:.3g}")
  row("  of the token loop", lambda p: f"{p['token_loop_seconds']:.3g}")
  row("seconds to compile", lambda p: f"{p['compile_seconds']:.0f}")
  return [*out, *table(rows), "", *_verdict(found)]


def _sent(size: float) -> str:
  return f"{size / 1e9:.4g}"


def _verdict(found: dict[str, Any]) -> list[str]:
  if not found["fits"]:
    over = {n: p for n, p in found["parts"].items() if not p["fits"]}
    return [
      f"does not fit: {name} takes {_gib(-part['left_bytes'])} GiB too much"
      for name, part in over.items()
    ]
  return [
    f"fits; a step takes about {found['step_seconds']:.3g} s: "
    f"{found['tokens_per_second']:.4g} tokens a second, "
    f"{found['mfu']:.1%} of peak (estimated: see grpojax/aot/roofline.py)"
  ]
