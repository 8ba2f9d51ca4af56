"""Which layout of a training step fits a machine, and is the fastest there.

Sampling and training are laid out apart, so they are searched apart:

- a rollout depends on the devices that share a weight (`mesh.sampling_tensor`);
- an update on its mesh, on the parts that it is cut into (`micro_batches`) and
  on which activations are computed again (`remat`). For each mesh, ever more
  and smaller parts are tried, up to the first that fit.

What is ranked is the sum of the two; the best is then compiled whole.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from grpojax.aot import chips, programs, report
from grpojax.aot.chips import Chip
from grpojax.aot.report import Say
from grpojax.models import hf
from grpojax.models.config import TransformerConfig
from grpojax.models.layer_stacks import REMAT
from grpojax.runtime.config import flatten
from grpojax.training import (
  batch_sizes,
  from_config,
  group_sizes,
  memory,
  sources,
)

LARGEST_TENSOR = 16
SAVED = {"full": 1, "selective": 4, "none": 10}
"""Activations kept of a layer, in sizes of its input; there are more."""


def _powers(limit: int) -> Iterator[int]:
  return itertools.takewhile(lambda n: n <= limit, (2**i for i in range(64)))


def tensors(model: TransformerConfig, devices: int) -> list[int]:
  """Numbers of devices that can share the heads of a model evenly."""
  return [
    n
    for n in _powers(min(devices, LARGEST_TENSOR))
    if devices % n == 0 and model.kv_heads % n == 0
  ]


def meshes(model: TransformerConfig, devices: int) -> list[dict[str, int]]:
  """Meshes worth trying: rows over fsdp, or over data too for small models."""
  found = []
  experts = _powers(devices) if model.experts else (1,)
  for expert, tensor in itertools.product(experts, tensors(model, devices)):
    rows = devices // (expert * tensor)
    if rows * expert * tensor != devices:
      continue
    if model.experts and model.experts % expert:
      continue
    for data in {1, rows // 8 if rows > 8 else 1}:
      shape = dict(data=data, fsdp=rows // data, expert=expert, tensor=tensor)
      if data * shape["fsdp"] == rows:
        found.append(shape)
  return found


def with_settings(config: ConfigDict, settings: dict[str, Any]) -> ConfigDict:
  """A copy of the config with other values, by dotted path."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.update_from_flattened_dict(settings)
  return config


def _try(config, settings, devices, name, machine, chip, say):
  """A program's part of the report under some settings; None if impossible."""
  config = with_settings(config, settings)
  shown = " ".join(f"{k.split('.')[-1]}={v}" for k, v in settings.items())
  try:
    mesh = from_config.mesh(config, devices)
    batch_sizes.check(config, mesh)
    memory.refuse(_least(config, mesh), chips.device(chip).hbm_bytes)
  except ValueError as error:
    say(f"{name} {shown}: {error}")
    return None
  part = report.measure(
    programs.open_run(config, mesh), name, machine, chip, lambda _: None
  )
  gib = part["memory_bytes"] / report.GIB
  took = f"{part['seconds']:.3g} s" if part["fits"] else "does not fit"
  say(f"{name} {shown}: {gib:.2f} GiB, {took}")
  return part


def _least(config: ConfigDict, mesh: jax.sharding.Mesh):
  """What a run cannot do without, see `training.memory`."""
  _, hf_config = programs.read_model(sources.model(config))
  model = hf.to_transformer_config(hf_config)
  phases = memory.training(config, model, mesh)
  return {
    phase: [
      part._replace(bytes=SAVED[config.model.remat] * part.bytes)
      if part.what == "activations"
      else part
      for part in found
    ]
    for phase, found in phases.items()
  }


def _settings(mesh: dict[str, int]) -> dict[str, int]:
  return {f"mesh.{axis}": n for axis, n in mesh.items()}


def _rollouts(config, model, every, args) -> list[tuple[Any, ...]]:
  """(seconds, settings, part) of what fits, for each way to share weights.

  The expert axis is the update's too, so it is part of the settings.
  """
  found, count = [], len(args[0])
  for expert in sorted({mesh["expert"] for mesh in every}):
    for tensor in tensors(model, count // expert):
      mesh = dict(data=1, fsdp=count // expert, expert=expert, tensor=1)
      settings = _settings(mesh) | {"mesh.sampling_tensor": tensor}
      part = _try(config, settings, args[0], "rollout", *args[1:])
      if part and part["fits"]:
        found.append((part["seconds"], expert, tensor, part))
        break  # a weight that more devices share takes longer to add up
  return found


def _updates(config, every, args) -> list[tuple[Any, ...]]:
  """(seconds, settings, part) of the first parts that fit, for each mesh."""
  found, samples = [], group_sizes.samples_per_step(flatten(config))
  for mesh, remat in itertools.product(every, REMAT):
    for micro_batches in _powers(samples // config.optim.minibatches):
      settings = _settings(mesh) | {
        "optim.micro_batches": micro_batches,
        "model.remat": remat,
      }
      part = _try(config, settings, args[0], "update", *args[1:])
      if part and part["fits"]:
        found.append((part["seconds"], settings, part))
        break
  return sorted(found, key=lambda item: item[0])


def check(config: ConfigDict) -> None:
  """Whether a run's layouts can be searched.

  Raises:
    ValueError: reward.on_device, which is not two programs; no such model.
  """
  if config.reward.on_device:
    raise ValueError(
      "--search needs --config.reward.on_device=False: it lays sampling and "
      "training out apart; without --search one layout of the fused step is "
      "compiled"
    )
  _, hf_config = programs.read_model(sources.model(config))
  hf.to_transformer_config(hf_config)


def search(
  config: ConfigDict,
  devices: list[jax.Device],
  machine: str,
  chip: Chip,
  say: Say,
) -> dict[str, Any]:
  """Tries layouts; see the module's docstring.

  Args:
    config: of the run; its mesh, micro-batches and remat are not used.
    devices: of the machine.
    machine: its name.
    chip: its chip.
    say: told what is being done.

  Returns:
    The report of the best layout, with all that fit as "ranking"; or, where
    nothing fits, {"fits": False, "ranking": []}.
  """
  _, hf_config = programs.read_model(sources.model(config))
  model = hf.to_transformer_config(hf_config)
  every = meshes(model, len(devices))
  args = devices, machine, chip, say
  rollouts = _rollouts(config, model, every, args)
  updates = _updates(config, every, args)
  ranking = sorted(
    (
      {
        "step_seconds": update[0] + rollout[0],
        "settings": update[1] | {"mesh.sampling_tensor": rollout[2]},
        "memory_bytes": max(
          rollout[3]["memory_bytes"], update[2]["memory_bytes"]
        ),
      }
      for update in updates
      for rollout in rollouts
      if rollout[1] == update[1]["mesh.expert"]
    ),
    key=lambda item: item["step_seconds"],
  )
  for layout in ranking:
    best = with_settings(config, layout["settings"])
    run = programs.open_run(best, from_config.mesh(best, devices))
    found = report.report(run, machine, chip, say)
    if found["fits"]:
      return found | {"ranking": ranking, "settings": layout["settings"]}
  return {"fits": False, "topology": machine, "ranking": ranking}


def command(settings: dict[str, Any]) -> str:
  """The settings as words of a command line."""
  return " ".join(
    f"--config.{name}={value}" for name, value in settings.items()
  )


def lines(found: dict[str, Any]) -> list[str]:
  """A search for people."""
  if not found["fits"]:
    return [f"{found['topology']}: nothing that was tried fits"]
  out = ["seconds a step, GiB a device, layout"]
  for layout in found["ranking"]:
    gib = layout["memory_bytes"] / report.GIB
    words = command(layout["settings"])
    out.append(f"{layout['step_seconds']:8.3g}  {gib:6.2f}  {words}")
  return [*out, "", *report.lines(found), "", command(found["settings"])]
