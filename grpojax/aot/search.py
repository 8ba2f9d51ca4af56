"""Search for a layout of a training step that fits a machine, and is fast.

Sampling and training are laid out apart, so they are searched apart:

- a rollout depends on the devices that share a weight (`mesh.sampling_tensor`);
- an update on its mesh, on its micro-batches and on which activations are
  computed again (`remat`). For each mesh, ever more and smaller micro-batches
  are tried, up to the first that fit.

Layouts are ranked by the sum of the two; the best is then compiled whole.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from flax.traverse_util import unflatten_dict

from grpojax.aot import chips, programs, report
from grpojax.aot.report import Say
from grpojax.aot.topology import Machine
from grpojax.models import huggingface as hf
from grpojax.models.config import TransformerConfig
from grpojax.models.layer_stacks import REMAT
from grpojax.training.run import hub_pins, memory, setup
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.run import TrainSettings

LARGEST_TENSOR = 16

Layout = dict[str, Any]
"""Settings of a layout, by their names in a config."""


def _powers(limit: int) -> Iterator[int]:
  """Powers of 2 up to a limit."""
  return itertools.takewhile(lambda n: n <= limit, (2**i for i in range(64)))


def tensors(model: TransformerConfig, devices: int) -> list[int]:
  """Returns the numbers of devices that can share a model's heads evenly."""
  return [
    n
    for n in _powers(min(devices, LARGEST_TENSOR))
    if devices % n == 0 and model.kv_heads % n == 0
  ]


def meshes(model: TransformerConfig, devices: int) -> list[dict[str, int]]:
  """Returns meshes worth trying: rows over fsdp, or over data too."""
  shapes = []
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
        shapes.append(shape)
  return shapes


def with_layout(
  settings: TrainSettings, layout: Mapping[str, Any]
) -> TrainSettings:
  """Returns the settings with those of a layout."""
  sections, optim = unflatten_dict(layout, sep="."), settings.optim
  update = dataclasses.replace(optim.update, **sections.get("optim", {}))
  return dataclasses.replace(
    settings,
    mesh=dataclasses.replace(settings.mesh, **sections["mesh"]),
    model=dataclasses.replace(settings.model, **sections.get("model", {})),
    optim=dataclasses.replace(optim, update=update),
  )


def _model(settings: TrainSettings) -> TransformerConfig:
  hf_config = programs.read_model(hub_pins.model(settings))
  return hf.to_transformer_config(hf_config)


def _try(
  settings: TrainSettings, layout: Layout, name: str, machine: Machine, say: Say
) -> dict[str, Any] | None:
  """A program's part of the report in a layout, if it fits."""
  settings = with_layout(settings, layout)
  words = " ".join(f"{k.split('.')[-1]}={v}" for k, v in layout.items())
  try:
    mesh = setup.make_mesh(settings, machine.devices)
    batches_lib.check_mesh(settings, mesh)
    teacher = programs.teacher_shape(settings)
    least = memory.training(settings, _model(settings), mesh, teacher)
    memory.refuse(least, chips.device(machine.chip).hbm_bytes)
  except ValueError as error:
    say(f"{name} {words}: {error}")
    return None
  run = programs.open_run(settings, mesh)
  part = report.measure(run, name, machine, lambda _: None)
  gib = part["memory_bytes"] / report.GIB
  verdict = f"{part['seconds']:.3g} s" if part["fits"] else "does not fit"
  say(f"{name} {words}: {gib:.2f} GiB, {verdict}")
  return part if part["fits"] else None


def _mesh_settings(mesh: dict[str, int]) -> Layout:
  return {f"mesh.{axis}": n for axis, n in mesh.items()}


def _rollouts(
  settings: TrainSettings, shapes: list[dict[str, int]], machine: Machine, say
) -> dict[int, tuple[int, dict[str, Any]]]:
  """The fewest devices a weight that fit, and the program, by size of expert.

  The expert axis is the update's too, so it is part of the settings.
  """
  fitting, count = {}, len(machine.devices)
  for expert in sorted({shape["expert"] for shape in shapes}):
    for tensor in tensors(_model(settings), count // expert):
      mesh = dict(data=1, fsdp=count // expert, expert=expert, tensor=1)
      layout = _mesh_settings(mesh) | {"mesh.sampling_tensor": tensor}
      part = _try(settings, layout, "rollout", machine, say)
      if part:
        fitting[expert] = tensor, part
        break  # a weight that more devices share takes longer to add up
  return fitting


def _updates(
  settings: TrainSettings, shapes: list[dict[str, int]], machine: Machine, say
) -> list[tuple[Layout, dict[str, Any]]]:
  """The first micro-batches that fit, for each mesh; the fastest first."""
  fitting, samples = [], batches_lib.samples_per_step(settings)
  for mesh, remat in itertools.product(shapes, REMAT):
    for micro_batches in _powers(samples // settings.optim.update.minibatches):
      layout = _mesh_settings(mesh)
      layout |= {"optim.micro_batches": micro_batches, "model.remat": remat}
      part = _try(settings, layout, "update", machine, say)
      if part:
        fitting.append((layout, part))
        break
  return sorted(fitting, key=lambda update: update[1]["seconds"])


def check(settings: TrainSettings) -> None:
  """Refuses a run whose layouts cannot be searched.

  Raises:
    ValueError: reward.on_device, which is not two programs; no such model.
  """
  if settings.reward.on_device:
    raise ValueError(
      "--search needs --config.reward.on_device=False: it lays sampling and "
      "training out apart; without --search one layout of the fused step is "
      "compiled"
    )
  _model(settings)


def search(
  settings: TrainSettings, machine: Machine, say: Say
) -> dict[str, Any]:
  """Tries layouts of sampling and of training.

  The settings' own mesh, micro-batches and remat are not used.

  Returns:
    The report of the best layout, with all that fit as "ranking"; or, where
    nothing fits, {"fits": False, "topology": machine, "ranking": []}.
  """
  shapes = meshes(_model(settings), len(machine.devices))
  rollouts = _rollouts(settings, shapes, machine, say)
  ranking = []
  for layout, update in _updates(settings, shapes, machine, say):
    if layout["mesh.expert"] in rollouts:
      tensor, rollout = rollouts[layout["mesh.expert"]]
      needed = rollout["memory_bytes"], update["memory_bytes"]
      one = {"step_seconds": update["seconds"] + rollout["seconds"]}
      one |= {"settings": layout | {"mesh.sampling_tensor": tensor}}
      ranking.append(one | {"memory_bytes": max(needed)})
  ranking.sort(key=lambda layout: layout["step_seconds"])
  for layout in ranking:
    best = with_layout(settings, layout["settings"])
    run = programs.open_run(best, setup.make_mesh(best, machine.devices))
    whole = report.report(run, machine, say)
    if whole["fits"]:
      return whole | {"ranking": ranking, "settings": layout["settings"]}
  return {"fits": False, "topology": machine.name, "ranking": ranking}


def command(settings: dict[str, Any]) -> str:
  """Returns the settings as words of a command line."""
  return " ".join(f"--config.{key}={value}" for key, value in settings.items())


def lines(result: dict[str, Any]) -> list[str]:
  """Writes the result of a search for people."""
  if not result["fits"]:
    return [f"{result['topology']}: nothing that was tried fits"]
  out = ["seconds a step, GiB a device, layout"]
  for layout in result["ranking"]:
    gib = layout["memory_bytes"] / report.GIB
    words = command(layout["settings"])
    out.append(f"{layout['step_seconds']:8.3g}  {gib:6.2f}  {words}")
  return [*out, "", *report.lines(result), "", command(result["settings"])]
