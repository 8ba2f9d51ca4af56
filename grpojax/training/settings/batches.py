"""Group sizes and batch sizes of a run, and their division over a mesh."""

import jax
from jax.sharding import Mesh

from grpojax.core.meshes import check_rows, sampling_mesh
from grpojax.core.packing import micro_batches
from grpojax.training.settings.run import AUTO, TrainSettings


def group_sizes(s: TrainSettings) -> list[int]:
  """Returns the possible group sizes: with "auto" several powers of two."""
  if s.group_size != AUTO:
    return [s.group_size]
  sizes = [s.auto_group_size.smallest]
  while sizes[-1] < s.auto_group_size.largest:
    sizes.append(2 * sizes[-1])
  return sizes


def samples_per_step(s: TrainSettings) -> int:
  """Returns the number of samples N = B G, the same at every step."""
  size = s.auto_group_size.start if s.group_size == AUTO else s.group_size
  return s.batch_size * size


def draw_parts(s: TrainSettings) -> int:
  """Returns the number of parts in which dynamic sampling draws a batch."""
  return s.filter_groups.gen_parts if s.filter_groups.enable else 1


def own_sampling_mesh(s: TrainSettings, mesh: Mesh) -> Mesh:
  """Returns the mesh for sampling, on devices reserved for sampling, if any.

  ValueError if axes do not fit, or if several processes reserve devices.
  """
  count = s.mesh.sampling_devices
  if count and jax.process_count() > 1:
    raise ValueError(
      f"mesh.sampling_devices = {count}: needs a single process: use 0"
    )
  separate = jax.devices()[-count:] if count else ()
  return sampling_mesh(mesh, s.mesh.sampling_tensor, separate)


def check_mesh(s: TrainSettings, mesh: Mesh) -> None:
  """Raises ValueError if a batch's rows cannot be divided among devices."""
  update = s.optim.update
  evaluating = sampling_mesh(mesh, s.mesh.sampling_tensor)
  check_rows(evaluating, eval_batch=s.eval.batch_size)
  sampling = own_sampling_mesh(s, mesh)
  rollout = "rollout"
  if s.mesh.sampling_devices:
    rollout = f"mesh.sampling_devices = {s.mesh.sampling_devices}: rollout"
  for size in group_sizes(s):
    rows = samples_per_step(s) // size
    for parts in {s.sampling.parts, draw_parts(s)}:
      check_rows(sampling, size, **{rollout: rows // parts})
    minibatch = rows // update.minibatches
    with jax.set_mesh(mesh):
      split = micro_batches.cuts(minibatch, size, update.micro_batches)
    check_rows(mesh, size // split[1], micro_batch=minibatch // split[0])
