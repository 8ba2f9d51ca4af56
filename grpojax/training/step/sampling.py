"""Sampling of a step's completions: compiled programs and their devices.

On a CPU two threads sample half of a batch each. Most operations of a small
model are too short for several cores, and XLA runs the operations of a program,
and the programs of a thread, one at a time: one program would use one core.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from grpojax.core import meshes, rows
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.rollout import rollout
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.environments.episodes import result
from grpojax.environments.pool import EnvironmentPool
from grpojax.models import passes, sharding
from grpojax.training import policies
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes

LARGEST_HALVED = 32 * 2**20
"""Maximum bytes of weights for sampling in halves. Larger weights keep several
cores busy in one program, and the two halves would read them twice."""


class NoSamples(Exception):
  """Raised by a sampler that has no samples; a run stops with the message."""


Program = Callable[..., Rollout]
"""`(params, prompts, key, *first_prompt) -> Rollout`; `first_prompt`, 0 by
default, is the index of the first prompt among all prompts with this key."""

Sampler = Callable[..., Generator[Any, None, episodes.Sampled]]
"""`(params, prompts, examples, key, *first_prompt, check_signals) -> Sampled`,
a generator for `as_completed`; it yields arrays while the devices compute."""


@functools.partial(jax.jit, static_argnames="parts")
def split(prompts: Prompts, *first: Array, parts: int) -> list[Any]:
  """Splits a batch into equal parts, with the indices of their first prompts.

  `first` is the index of the batch's first prompt, by default 0.
  """
  size = prompts.prompt_ids.shape[0] // parts
  part = lambda i: rows.constrain(rows.take(prompts, slice(i, i + size)))
  start = first[0] if first else 0
  starts = [i * size for i in range(parts)]
  return [(part(i), jnp.int32(start + i)) for i in starts]


@jax.jit
def join(parts: Sequence[Rollout]) -> Rollout:
  """Joins the rollouts of parts, whose prompts may differ in length."""
  return rows.constrain(rows.concatenate(parts))


def halves_pay(weights: PyTree, rows: int, devices: Sequence[Any]) -> bool:
  """Returns True if sampling `rows` prompts in two halves is faster."""
  one_cpu = [device.platform for device in devices] == ["cpu"]
  # Synchronous dispatch would finish the first half before the second starts.
  overlaps = jax.config.values.get("jax_cpu_enable_async_dispatch", True)
  size = sum(x.nbytes for x in jax.tree.leaves(weights))
  fits = rows % 2 == 0 and size <= LARGEST_HALVED
  return one_cpu and overlaps and (os.cpu_count() or 1) > 1 and fits


def sample_halves(program: Program, mesh: jax.sharding.Mesh | None) -> Program:
  """Returns a program that runs another, in two halves if that is faster."""
  devices = list(mesh.devices.flat) if mesh else jax.devices()[:1]

  def sampler(params: Params, prompts: Prompts, key: Array, *first: Array):
    weights = program.args, params  # frozen weights, and trained ones
    if not halves_pay(weights, prompts.prompt_ids.shape[0], devices):
      return program(params, prompts, key, *first)
    (prompts_1, first_1), (prompts_2, first_2) = split(prompts, *first, parts=2)

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
):
  """Compiles a sampler, `(params, prompts, key, first_prompt=0) -> Rollout`.

  `budgets(prompts)` [B, G] limits the tokens of each sample; the default is
  `sampling.max_new_tokens`.
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
  shardings = rows.map_rows(
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
) -> Program:
  """Runs a program on `sampling_mesh` for arrays on the training mesh.

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
    count = len(prompts.prompt_ids)
    with jax.set_mesh(sampling_mesh):
      if count not in samplers:
        pinned = program
        if sampling_mesh is not mesh:
          pinned = with_result_shardings(program, sampling_mesh, *args)
        samplers[count] = sample_halves(pinned, sampling_mesh)
      rollout = samplers[count](*args)
    return rows.place(rollout, mesh)

  return sampler


def make_sampler(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  sampling: Sampling,
  mesh: jax.sharding.Mesh | None = None,
  environment: EnvironmentPool | None = None,
  *,
  sampling_mesh: jax.sharding.Mesh | None = None,
  budgets: Callable[[Prompts], Array] | None = None,
) -> Sampler:
  """Returns a function that samples completions, or plays an environment.

  Without a mesh it uses one device; by default `sampling_mesh` has all devices.
  `budgets`, not used by environments, is described in `sampler_program`.
  """
  if environment is not None:
    return episodes.make_player(
      settings, policy, group_size, sampling, environment, mesh
    )
  program = sampler_program(settings, policy, group_size, sampling, budgets)
  if mesh is None:
    program = sample_halves(program, None)
  else:
    tensor = settings.mesh.sampling_tensor
    sampling_mesh = sampling_mesh or meshes.sampling_mesh(mesh, tensor)
    program = on_sampling_mesh(program, mesh, sampling_mesh)

  def sample(params, prompts, examples, key, *first, check_signals=None):
    del examples, check_signals
    sampled = episodes.sampled(program(params, prompts, key, *first))
    yield sampled.rollout
    return sampled

  return sample


def complete(
  sampler: Sampler,
  params: Params,
  prompts: Prompts,
  examples: Sequence[dict[str, Any]],
  key: Array,
  check_signals: Callable[[], None] = lambda: None,
) -> episodes.Sampled:
  """Samples completions and waits for them."""
  play = sampler(params, prompts, examples, key, check_signals=check_signals)
  sampled = result(play)
  policies.wait(sampled.rollout, check_signals)
  return sampled
