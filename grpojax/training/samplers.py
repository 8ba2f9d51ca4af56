"""A run's sampler, compiled, and where it lies on the mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.rollout import rollout
from grpojax.core.sampling import Sampling
from grpojax.core.types import Prompts
from grpojax.training import from_config, halves
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy


def sampler_program(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  sampling: Sampling,
  budgets: Callable[[Prompts], jax.Array] | None = None,
):
  """`(params, prompts, key, first=0) -> Rollout`, jitted; see `make_sampler`.

  `first` is the `first_prompt` of `rollout`.

  Args:
    config: see `make_sampler`, as for the arguments that follow.
    policy: likewise.
    group_size: likewise.
    sampling: likewise.
    budgets: the prompts -> [B, G], tokens that each sample may spend; None is
      `sampling.max_new_tokens` for all.
  """
  draw = functools.partial(
    rollout,
    group_size=group_size,
    max_new_tokens=config.sampling.max_new_tokens,
    eos_ids=policy.eos_ids,
    pad_id=policy.pad_id,
    sampling=sampling,
    decoding=from_config.decoding(config),
  )

  def sample(lm, params, prompts, key, first=0):
    options = {"budgets": budgets(prompts)} if budgets else {}
    return draw(lm, params, prompts, key, first_prompt=first, **options)

  return policy_lib.jit(policy, sample)


def laid_out(program: Callable[..., Any], mesh: jax.sharding.Mesh, *args: Any):
  """A program of `sampler_program` whose results lie on the sampling mesh.

  For parameters on another mesh: of the two that XLA (Shardy) is told of then,
  it may take one for the other where a result's place is a constraint alone.

  Args:
    program: `(params, prompts, key, *first) -> Rollout`.
    mesh: of sampling, in context.
    *args: of the program; shapes will do.
  """
  shardings = mesh_lib.map_rows(
    lambda x, *names: mesh_lib.activation_sharding(mesh, x.shape, *names),
    jax.eval_shape(program, *args),
  )
  pinned = jax.jit(program.func, out_shardings=shardings)
  return functools.partial(pinned, *program.args)


def on_sampling_mesh(
  config: ConfigDict, program: Callable[..., Any], mesh: jax.sharding.Mesh
):
  """A program of `sampler_program`, called with what lies on another mesh.

  JAX computes nothing of arrays of two meshes. The parameters are laid out
  anew by the program itself, once they are cast (`LM.prepare`).

  Args:
    config: of the run.
    program: `(params, prompts, key, *first) -> Rollout`.
    mesh: of training; its arrays go in, and its arrays come out.
  """
  sampling_mesh = mesh_lib.sampling_mesh(mesh, config.mesh.sampling_tensor)
  programs = {}  # by how many prompts there are

  def sampler(params, prompts, key, *first):
    prompts = mesh_lib.place(prompts, sampling_mesh, "batch")
    numbers = mesh_lib.place((key, *first), sampling_mesh)
    args, rows = (params, prompts, *numbers), len(prompts.prompt_ids)
    with jax.set_mesh(sampling_mesh):
      if rows not in programs:
        apart = sampling_mesh is not mesh
        pinned = laid_out(program, sampling_mesh, *args) if apart else program
        programs[rows] = halves.at_once(pinned, sampling_mesh)
      samples = programs[rows](*args)
    return mesh_lib.map_rows(
      lambda x, *names: mesh_lib.place(x, mesh, *names), samples
    )

  return sampler


def make_sampler(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  sampling: Sampling,
  mesh: jax.sharding.Mesh | None = None,
):
  """`(params, prompts, key) -> Rollout`, jitted.

  Args:
    config: of the run or the evaluation.
    policy: the model.
    group_size: G.
    sampling: the distribution to draw from.
    mesh: of training; None is one device.
  """
  program = sampler_program(config, policy, group_size, sampling)
  if mesh is None:
    return halves.at_once(program, None)
  return on_sampling_mesh(config, program, mesh)
