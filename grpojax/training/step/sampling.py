"""Sampling of a step's completions: compiled programs and their devices.

On a CPU two threads sample half of a batch each. Most operations of a small
model are too short for several cores, and XLA runs the operations of a program,
and the programs of a thread, one at a time: one program would use one core.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from grpojax.core import meshes
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.dynamic_sampling import pad_prompts
from grpojax.core.rollout import rollout
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.environments.episodes import play_together
from grpojax.environments.pool import EnvironmentPool
from grpojax.models import passes, sharding
from grpojax.training import policies
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes
from grpojax.training.step.episodes import Sampled

LARGEST_HALVED = 32 * 2**20
"""Maximum bytes of weights for sampling in halves. Larger weights keep several
cores busy in one program, and the two halves would read them twice."""

Sampler = Callable[..., Rollout]
"""`(params, prompts, key, *first_prompt) -> Rollout`; `first_prompt`, 0 by
default, is the index of the first prompt among all prompts with this key."""


def split_prompts(
  prompts: Prompts, first: Int[Array, ""] | int = 0, *, parts: int
) -> list[tuple[Prompts, Int[Array, ""]]]:
  """Splits a batch into equal parts with the indices of their first prompts."""
  rows = prompts.prompt_ids.shape[0] // parts

  def part(start):
    split = jax.tree.map(
      lambda x: meshes.constrain(x[start : start + rows], "batch"), prompts
    )
    return split, jnp.int32(first + start)

  return [part(i * rows) for i in range(parts)]


def join_rollouts(parts: list[Rollout]) -> Rollout:
  """Joins the rollouts of parts, whose prompts may differ in length."""
  # Pad prompts to the same length before joining.
  longest = max(part.prompt_ids.shape[-1] for part in parts)
  parts = [pad_prompts(part, longest) for part in parts]
  whole = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
  return meshes.map_rows(meshes.constrain, whole)


def halves_pay(weights: PyTree, rows: int, devices: Sequence[Any]) -> bool:
  """Returns True if sampling `rows` prompts in two halves is faster."""
  one_cpu = [device.platform for device in devices] == ["cpu"]
  # Synchronous dispatch would finish the first half before the second starts.
  overlaps = jax.config.values.get("jax_cpu_enable_async_dispatch", True)
  size = sum(x.nbytes for x in jax.tree.leaves(weights))
  fits = rows % 2 == 0 and size <= LARGEST_HALVED
  return one_cpu and overlaps and (os.cpu_count() or 1) > 1 and fits


def sample_halves(program: Sampler, mesh: jax.sharding.Mesh | None) -> Sampler:
  """Returns a sampler that runs a program, in two halves if that is faster."""
  split = jax.jit(functools.partial(split_prompts, parts=2))
  join = jax.jit(join_rollouts)
  devices = list(mesh.devices.flat) if mesh else jax.devices()[:1]

  def sampler(params: Params, prompts: Prompts, key: Array, *first: Array):
    weights = program.args, params  # frozen weights, and trained ones
    if not halves_pay(weights, prompts.prompt_ids.shape[0], devices):
      return program(params, prompts, key, *first)
    (prompts_1, first_1), (prompts_2, first_2) = split(prompts, *first)

    def second_half():  # a mesh is set per thread
      with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        return program(params, prompts_2, key, first_2)

    with ThreadPoolExecutor(1) as thread:
      half = program(params, prompts_1, key, first_1)  # compiles the program
      return join([half, thread.submit(second_half).result()])

  return sampler


def sampler_program(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  sampling: Sampling,
  budgets: Callable[[Prompts], jax.Array] | None = None,
  record_experts: bool = False,
):
  """Compiles a sampler, `(params, prompts, key, first_prompt=0) -> Rollout`.

  `budgets(prompts)` [B, G] limits the tokens of each sample; the default is
  `sampling.max_new_tokens`. See `rollout` for `record_experts`.
  """

  def sample(lm, params, prompts, key, first_prompt=0):
    return rollout(
      lm,
      params,
      prompts,
      key,
      group_size=group_size,
      max_new_tokens=settings.sampling.max_new_tokens,
      eos_ids=policy.ends,
      pad_id=policy.pad_id,
      sampling=sampling,
      budgets=budgets(prompts) if budgets else None,
      first_prompt=first_prompt,
      record_experts=record_experts,
    )

  return policies.jit(policy, sample)


def with_result_shardings(
  program: Callable[..., Any], mesh: jax.sharding.Mesh, *args: Any
):
  """Pins the results of a `sampler_program` to the sampling mesh.

  If parameters are on another mesh, and the sharding of a result is only a
  constraint, XLA (Shardy) may confuse the two meshes. `args` are the program's
  arguments, or their shapes; `jax.set_mesh(mesh)` must be active.
  """
  shardings = meshes.map_rows(
    lambda x, *names: meshes.activation_sharding(mesh, x.shape, *names),
    jax.eval_shape(program, *args),
  )
  pinned = jax.jit(program.func, out_shardings=shardings)
  return functools.partial(pinned, *program.args)


def moved_params(
  policy: policies.Policy, dtype: str, mesh: jax.sharding.Mesh
) -> Callable[[Params], Params]:
  """Returns a function that copies parameters to the sampling devices."""

  def moved(params: Params) -> Params:
    return jax.device_put(params, sharding.shardings(params, mesh))

  if policy.frozen is not None:
    return moved  # adapters are small and not cast
  # Casting before the copy moves fewer bytes.
  cast = jax.jit(functools.partial(passes.cast, dtype=jnp.dtype(dtype)))
  return lambda params: moved(cast(params))


def on_sampling_mesh(
  program: Callable[..., Any],
  mesh: jax.sharding.Mesh,
  sampling_mesh: jax.sharding.Mesh,
) -> Sampler:
  """Returns a sampler on `sampling_mesh` for arrays on the training mesh.

  JAX cannot combine arrays of two meshes, so prompts and samples are moved. The
  program itself casts and moves parameters (`LM.prepare`), except to separate
  sampling devices, which already have them (`moved_params`).
  """
  samplers = {}  # sampler for each number of prompts
  # Separate devices get a copy of the frozen weights once, not at each call.
  if not set(sampling_mesh.devices.flat) & set(mesh.devices.flat):
    shardings = sharding.shardings(program.args, sampling_mesh)
    frozen = jax.device_put(program.args, shardings)
    program = functools.partial(program.func, *frozen)

  def sampler(params, prompts, key, *first):
    prompts = meshes.place(prompts, sampling_mesh, "batch")
    others = meshes.place((key, *first), sampling_mesh)
    args = params, prompts, *others
    rows = len(prompts.prompt_ids)
    with jax.set_mesh(sampling_mesh):
      if rows not in samplers:
        pinned = program
        if sampling_mesh is not mesh:
          pinned = with_result_shardings(program, sampling_mesh, *args)
        samplers[rows] = sample_halves(pinned, sampling_mesh)
      rollout = samplers[rows](*args)
    return meshes.map_rows(
      lambda x, *names: meshes.place(x, mesh, *names), rollout
    )

  return sampler


def make_sampler(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  sampling: Sampling,
  mesh: jax.sharding.Mesh | None = None,
  environment: EnvironmentPool | None = None,
) -> Callable[..., Sampled]:
  """Returns a function that samples completions, or plays an environment.

  It is `(params, prompts, examples, key, check_signals) -> Sampled`, on one
  device if `mesh` is None.
  """
  if environment is not None:
    player = episodes.make_player(
      settings, policy, group_size, sampling, environment, mesh
    )

    def play(params, prompts, examples, key, check_signals=lambda: None):
      playing = player(
        params, prompts, examples, key, check_signals=check_signals
      )
      return play_together(playing)[0]

    return play
  program = sampler_program(settings, policy, group_size, sampling)
  if mesh is None:
    sampler = sample_halves(program, None)
  else:
    sampling_mesh = meshes.sampling_mesh(mesh, settings.mesh.sampling_tensor)
    sampler = on_sampling_mesh(program, mesh, sampling_mesh)

  def sample(params, prompts, examples, key, check_signals=lambda: None):
    del examples
    rollout = sampler(params, prompts, key)
    policies.wait(rollout, check_signals)
    return episodes.sampled(rollout)

  return sample
