"""A step whose samples are drawn one step ahead: seconds, by who samples.

A rollout takes a + b / x on a share x of the devices: a is the latency of its
tokens, one after another, which no device shortens, and b the work of its
samples. An update takes u / (1 - x) on the others. Where all devices do both,
one after the other, a step takes a + b + u; where some sample while the others
learn, the longer of the two. b / x and u / (1 - x) are never both below b + u,
so that this gains a at the most. Sending the weights is not counted.
"""

from collections.abc import Sequence
from typing import Any


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
  best = min(result["splits"], key=lambda x: x["step_seconds"], default=None)
  if best is None:
    why = "for one process, no environment, and batches that divide over them"
    return [*text, f"no devices of their own for sampling: they are {why}"]
  if best["step_seconds"] >= together:
    return [*text, "devices of their own for sampling would gain nothing"]
  gain = together / best["step_seconds"]
  return [
    *text,
    f"mesh.sampling_devices={best['sampling_devices']} mesh.data=1 "
    f"mesh.fsdp=-1: {best['step_seconds']:.3g} s a step, {gain:.2f} times as "
    f"fast (rollout {best['rollout_seconds']:.3g} s, update "
    f"{best['update_seconds']:.3g} s)",
  ]
