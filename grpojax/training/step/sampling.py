"""Sampling of a step's completions: the compiled program, and where it runs.

On CPUs the two halves of a batch are sampled at once. Most operations of a
small model's sampled token are too short to be shared by threads: one program
keeps little more than one core at work. XLA runs what is independent in one
program in turn, and so it does with the programs that one thread asks for. So
two threads ask, each for half of the prompts.
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

from grpojax.core import mesh as mesh_lib
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.dynamic_sampling import pad_prompts
from grpojax.core.rollout import rollout
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.environments.episodes import play_together
from grpojax.environments.pool import EnvironmentPool
from grpojax.models import passes, sharding
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes
from grpojax.training.step.episodes import Sampled

LARGEST_HALVED = 32 * 2**20
"""Bytes of weights, above which both cores have enough to do for one program,
and reading the weights twice costs more than it brings."""

Sampler = Callable[..., Rollout]
"""`(params, prompts, key, *first_prompt) -> Rollout`, where `first_prompt` is
the number of the first prompt among those that share the key; 0 without it."""


def split_prompts(
  prompts: Prompts, first: Int[Array, ""] | int = 0, *, parts: int
) -> list[tuple[Prompts, Int[Array, ""]]]:
  """Splits a batch into equal parts, each with its first prompt's number."""
  rows = prompts.prompt_ids.shape[0] // parts

  def part(start):
    split = jax.tree.map(
      lambda x: mesh_lib.constrain(x[start : start + rows], "batch"), prompts
    )
    return split, jnp.int32(first + start)

  return [part(i * rows) for i in range(parts)]


def join_rollouts(parts: list[Rollout]) -> Rollout:
  """Joins the rollouts of a batch's parts, in their order.

  What environments' resets observed may have made prompts of two lengths.
  """
  longest = max(part.prompt_ids.shape[-1] for part in parts)
  parts = [pad_prompts(part, longest) for part in parts]
  whole = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
  return mesh_lib.map_rows(mesh_lib.constrain, whole)


def halves_pay(weights: PyTree, rows: int, devices: Sequence[Any]) -> bool:
  """Returns True where two halves take less time than the whole batch.

  `weights` are what a program reads for a token, `rows` the batch's prompts.
  """
  one_cpu = [device.platform for device in devices] == ["cpu"]
  # Else one thread would wait for its half before the other begins.
  dispatches = jax.config.values.get("jax_cpu_enable_async_dispatch", True)
  size = sum(x.nbytes for x in jax.tree.leaves(weights))
  fits = rows % 2 == 0 and size <= LARGEST_HALVED
  return one_cpu and dispatches and (os.cpu_count() or 1) > 1 and fits


def sample_halves(program: Sampler, mesh: jax.sharding.Mesh | None) -> Sampler:
  """Makes a sampler of a `sampler_program`, in halves where that pays.

  `mesh` is that of sampling; None is one device.
  """
  split = jax.jit(functools.partial(split_prompts, parts=2))
  join = jax.jit(join_rollouts)
  devices = list(mesh.devices.flat) if mesh else jax.devices()[:1]

  def sampler(params: Params, prompts: Prompts, key: Array, *first: Array):
    weights = program.args, params  # the first are frozen ones
    if not halves_pay(weights, prompts.prompt_ids.shape[0], devices):
      return program(params, prompts, key, *first)
    (prompts_1, first_1), (prompts_2, first_2) = split(prompts, *first)

    def second_half():  # a mesh is set for one thread alone
      with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        return program(params, prompts_2, key, first_2)

    with ThreadPoolExecutor(1) as thread:
      half = program(params, prompts_1, key, first_1)  # compiles, for both
      return join([half, thread.submit(second_half).result()])

  return sampler


def sampler_program(
  settings: TrainSettings,
  policy: Policy,
  group_size: int,
  sampling: Sampling,
  budgets: Callable[[Prompts], jax.Array] | None = None,
  record_experts: bool = False,
):
  """Compiles `(params, prompts, key, first_prompt=0) -> Rollout`.

  `budgets`, of prompts, are the tokens [B, G] that each sample may spend; None
  is `sampling.max_new_tokens` for all. `record_experts` is that of `rollout`.
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
      decoding=settings.sampling.decoding,
      budgets=budgets(prompts) if budgets else None,
      first_prompt=first_prompt,
      record_experts=record_experts,
    )

  return policy_lib.jit(policy, sample)


def with_result_shardings(
  program: Callable[..., Any], mesh: jax.sharding.Mesh, *args: Any
):
  """Pins the results of a `sampler_program` to the sampling mesh.

  Where parameters lie on another mesh, XLA (Shardy) knows of two, and may take
  one for the other where a result's sharding is a constraint alone. `args` are
  the program's arguments, or their shapes; the mesh is in context.
  """
  shardings = mesh_lib.map_rows(
    lambda x, *names: mesh_lib.activation_sharding(mesh, x.shape, *names),
    jax.eval_shape(program, *args),
  )
  pinned = jax.jit(program.func, out_shardings=shardings)
  return functools.partial(pinned, *program.args)


def moved_params(
  policy: Policy, dtype: str, mesh: jax.sharding.Mesh
) -> Callable[[Params], Params]:
  """Makes the copying of parameters to other devices, as these read them."""

  def moved(params: Params) -> Params:
    return jax.device_put(params, sharding.shardings(params, mesh))

  if policy.frozen is not None:
    return moved  # adapters, which are small
  cast = jax.jit(functools.partial(passes.cast, dtype=jnp.dtype(dtype)))
  return lambda params: moved(cast(params))


def on_sampling_mesh(
  program: Callable[..., Any],
  mesh: jax.sharding.Mesh,
  sampling_mesh: jax.sharding.Mesh,
) -> Sampler:
  """Makes a sampler on its own mesh, of arrays that lie on that of training.

  JAX computes nothing of arrays of two meshes. The parameters are laid out
  anew by the program itself, once they are cast (`LM.prepare`); on devices that
  only sample they lie already (`moved_params`).
  """
  samplers = {}  # by the number of prompts
  if not set(sampling_mesh.devices.flat) & set(mesh.devices.flat):
    own = jax.device_put(
      program.args, sharding.shardings(program.args, sampling_mesh)
    )
    program = functools.partial(program.func, *own)

  def sampler(params, prompts, key, *first):
    prompts = mesh_lib.place(prompts, sampling_mesh, "batch")
    key, *first = mesh_lib.place((key, *first), sampling_mesh)
    rows = len(prompts.prompt_ids)
    with jax.set_mesh(sampling_mesh):
      if rows not in samplers:
        pinned = program
        if sampling_mesh is not mesh:
          pinned = with_result_shardings(
            program, sampling_mesh, params, prompts, key, *first
          )
        samplers[rows] = sample_halves(pinned, sampling_mesh)
      rollout = samplers[rows](params, prompts, key, *first)
    return mesh_lib.map_rows(
      lambda x, *names: mesh_lib.place(x, mesh, *names), rollout
    )

  return sampler


def make_sampler(
  settings: TrainSettings,
  policy: Policy,
  group_size: int,
  sampling: Sampling,
  mesh: jax.sharding.Mesh | None = None,
  environment: EnvironmentPool | None = None,
) -> Callable[..., Sampled]:
  """Makes `(params, prompts, examples, key, check_signals) -> Sampled`.

  On one device or a mesh, with the environment's answers where there is one.
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
    sampling_mesh = mesh_lib.sampling_mesh(mesh, settings.mesh.sampling_tensor)
    sampler = on_sampling_mesh(program, mesh, sampling_mesh)

  def sample(params, prompts, examples, key, check_signals=lambda: None):
    del examples
    rollout = sampler(params, prompts, key)
    policy_lib.wait(rollout, check_signals)
    return episodes.sampled(rollout)

  return sample
