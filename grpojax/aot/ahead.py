"""A step whose samples are drawn one step ahead: seconds, by who samples.

A rollout takes a + b / x on a share x of the devices: a is the latency of its
tokens, one after another, which no device shortens, and b the work of its
samples. An update takes u / (1 - x) on the others. Where all devices do both,
one after the other, a step takes a + b + u; where some sample while the others
learn, the longer of the two. b / x and u / (1 - x) are never both below b + u,
so that this gains a at the most. Sending the weights is not counted.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from grpojax.aot import programs
from grpojax.aot.topology import Machine
from grpojax.core import mesh as mesh_lib
from grpojax.training.config import from_config, to_config
from grpojax.training.run import setup
from grpojax.training.settings import batches as batches_lib


def fit(whole: float, part: float, share: float) -> tuple[float, float]:
  """Returns a and b of a rollout, from its seconds with fewer samples.

  `whole` are its seconds with all samples, `part` those with a `share` of them,
  both on all devices.
  """
  work = min(max((whole - part) / (1 - share), 0.0), whole)
  return whole - work, work


def splits(
  latency: float,
  work: float,
  update: float,
  devices: int,
  numbers: Sequence[int],
) -> dict[str, Any]:
  """Returns seconds of a step for these `numbers` of sampling devices.

  Args:
    latency: a, seconds.
    work: b, seconds.
    update: u, seconds, with the reference's pass.
    devices: number of all devices.
    numbers: numbers of devices that may sample, each below `devices`.
  """
  of_splits = []
  for number in numbers:
    rollout = latency + work * devices / number
    of_update = update * devices / (devices - number)
    of_splits.append(
      {
        "sampling_devices": number,
        "rollout_seconds": rollout,
        "update_seconds": of_update,
        "step_seconds": max(rollout, of_update),
      }
    )
  return {
    "latency_seconds": latency,
    "work_seconds": work,
    "update_seconds": update,
    "step_seconds": latency + work + update,
    "splits": of_splits,
  }


def of_run(
  run: programs.Run,
  seconds: dict[str, float],
  machine: Machine,
  rollout_seconds: Callable[[programs.Run], float],
) -> dict[str, Any]:
  """Returns `splits` of a run, with what its two points are.

  A rollout of fewer prompts is compiled, too: of half of them, or of as many as
  are cut over the devices like all. Without any, all is taken for latency.

  Args:
    run: run with samples drawn one ahead.
    seconds: seconds of its programs, by name.
    machine: machine with all devices.
    rollout_seconds: seconds of the rollout of another run.
  """
  settings, parts = run.settings, run.settings.sampling.parts
  mesh = mesh_lib.sampling_mesh(run.mesh, settings.mesh.sampling_tensor)
  latency, work, fewer = seconds["rollout"], 0.0, {}
  for prompts in range(run.prompts // 2, 0, -1):
    if prompts % parts:
      continue
    with contextlib.suppress(ValueError):
      mesh_lib.check_rows(mesh, run.group_size, rollout=prompts // parts)
      other = dataclasses.replace(settings, batch_size=prompts)
      part = rollout_seconds(programs.open_run(other, run.mesh))
      latency, work = fit(latency, part, prompts / run.prompts)
      fewer = {"fewer_prompts": prompts, "fewer_prompts_seconds": part}
      break
  numbers = [n for n in range(1, run.mesh.size) if _may_sample(run, n, machine)]
  update = sum(seconds.values()) - seconds["rollout"]
  return splits(latency, work, update, run.mesh.size, numbers) | fewer


def _may_sample(run: programs.Run, number: int, machine: Machine) -> bool:
  """Returns True where training takes so many devices for sampling alone.

  With `mesh.data` = 1 and `mesh.fsdp` = -1, for the others, which learn.
  """
  settings, devices = run.settings, machine.devices
  mesh = settings.mesh
  mesh = dataclasses.replace(mesh, sampling_devices=number, data=1, fsdp=-1)
  settings = dataclasses.replace(settings, mesh=mesh)
  one_process = len({device.process_index for device in devices}) == 1
  try:
    from_config(to_config(settings))  # refuses what does not go together
    batches_lib.check_mesh(
      settings, setup.make_mesh(settings, devices), devices
    )
  except ValueError:
    return False
  return one_process


def lines(result: dict[str, Any]) -> list[str]:
  """Writes what `splits` returns for people: the best one, and its gain."""
  latency, work, update, together = (
    result[f"{name}_seconds"] for name in ("latency", "work", "update", "step")
  )
  text = [
    "one step ahead, by the roofline and without rewards: a rollout takes "
    f"{latency:.3g} s and {work:.3g} s / share of the devices, an update "
    f"{update:.3g} s / share",
    f"all devices do both: {together:.3g} s a step",
  ]
  if number := result.get("fewer_prompts"):
    part = result["fewer_prompts_seconds"]
    text[0] += f" (a rollout of {number} prompts takes {part:.3g} s)"
  best = min(result["splits"], key=lambda x: x["step_seconds"], default=None)
  if best is None:
    why = "for one process, no environment, and batches that divide over them"
    return [*text, f"no devices of their own for sampling: they are {why}"]
  if best["step_seconds"] >= together:
    return [*text, "devices of their own for sampling would gain nothing"]
  gain = together / best["step_seconds"]
  return [
    *text,
    "in place of the mesh above: "
    f"mesh.sampling_devices={best['sampling_devices']} mesh.data=1 "
    f"mesh.fsdp=-1: {best['step_seconds']:.3g} s a step, {gain:.2f} times as "
    f"fast (rollout {best['rollout_seconds']:.3g} s, update "
    f"{best['update_seconds']:.3g} s)",
  ]
