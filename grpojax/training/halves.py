"""On CPUs, the two halves of a batch are sampled at once.

Most operations of a small model's sampled token are too short to be shared by
threads: one program keeps little more than one core at work. XLA runs what is
independent in one program in turn, and so it does with the programs that one
thread asks for. So two threads ask, each for half of the prompts.
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
from grpojax.core.types import Params, Prompts, Rollout

LARGEST = 32 * 2**20
"""Bytes of weights, above which both cores have enough to do for one program,
and reading the weights twice costs more than it brings."""

Sampler = Callable[..., Rollout]


def cut(
  prompts: Prompts, first: Int[Array, ""] | int = 0, *, parts: int
) -> list[tuple[Prompts, Int[Array, ""]]]:
  """The parts of a batch, each with the number of its first prompt.

  Args:
    prompts: B of them.
    first: number of the first of them.
    parts: of equal size; divides B.
  """
  rows = prompts.prompt_ids.shape[0] // parts

  def part(start):
    some = jax.tree.map(lambda x: x[start : start + rows], prompts)
    some = jax.tree.map(lambda x: mesh_lib.constrain(x, "batch"), some)
    return some, jnp.int32(first + start)

  return [part(i * rows) for i in range(parts)]


def join(parts: list[Rollout]) -> Rollout:
  """The samples of the whole batch."""
  whole = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
  return mesh_lib.map_rows(mesh_lib.constrain, whole)


def pays(weights: PyTree, rows: int, devices: Sequence[Any]) -> bool:
  """Whether two halves take less time than the whole.

  Args:
    weights: all that a program reads for a token.
    rows: prompts of the batch.
    devices: that sample.
  """
  one_cpu = [device.platform for device in devices] == ["cpu"]
  # Else one thread would wait for its half before the other begins.
  starts = jax.config.values.get("jax_cpu_enable_async_dispatch", True)
  size = sum(x.nbytes for x in jax.tree.leaves(weights))
  fits = rows % 2 == 0 and size <= LARGEST
  return one_cpu and starts and (os.cpu_count() or 1) > 1 and fits


def at_once(program: Sampler, mesh: jax.sharding.Mesh | None) -> Sampler:
  """A program of `samplers.sampler_program`, of both halves where that pays.

  Args:
    program: `(params, prompts, key, *first) -> Rollout`.
    mesh: of sampling; None is one device.
  """
  split = jax.jit(functools.partial(cut, parts=2))
  whole = jax.jit(join)
  devices = list(mesh.devices.flat) if mesh else jax.devices()[:1]

  def sampler(params: Params, prompts: Prompts, key: Array, *first: Array):
    weights = program.args, params  # the first are frozen ones
    if not pays(weights, prompts.prompt_ids.shape[0], devices):
      return program(params, prompts, key, *first)
    (one, at), (two, then) = split(prompts, *first)

    def second():  # what a mesh is set for is one thread
      context = jax.set_mesh(mesh) if mesh else contextlib.nullcontext()
      with context:
        return program(params, two, key, then)

    with ThreadPoolExecutor(1) as thread:
      begun = program(params, one, key, at)  # compiles, for both
      return whole([begun, thread.submit(second).result()])

  return sampler
