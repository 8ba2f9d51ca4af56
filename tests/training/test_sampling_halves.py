"""Two halves of a batch at once: the samples of the whole."""

import functools
import os
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.training.step import sampling as sampling_lib


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
  monkeypatch.setattr(os, "cpu_count", lambda: 2)


def one_device():
  return mesh_lib.make_mesh(devices=jax.devices()[:1])


def prompts_of(rows):
  ids = 2 + jnp.arange(3 * rows).reshape(rows, 3) % 7
  return Prompts(ids, jnp.arange(3) < 1 + jnp.arange(rows)[:, None] % 3)


def program_of(lm):
  """As `sampling_lib.sampler_program` makes it; without weights of its own."""

  def sample(params, prompts, key, first=0):
    return rollout(
      lm,
      params,
      prompts,
      key,
      group_size=3,
      max_new_tokens=9,
      eos_ids=(1,),
      first_prompt=first,
    )

  return functools.partial(jax.jit(sample))


@pytest.mark.parametrize(
  "mesh, first",
  [
    pytest.param("one device", (jnp.int32(5),), marks=pytest.mark.slow),
    pytest.param(None, (), marks=pytest.mark.long),
  ],
)
def test_the_samples_are_those_of_the_whole(tiny, mesh, first):
  mesh = mesh and one_device()
  program = program_of(tiny.lm)
  args = tiny.params, prompts_of(4), jax.random.key(3), *first
  halved = sampling_lib.sample_halves(program, mesh)(*args)
  whole = program(*args)
  for name, of_whole in vars(whole).items():
    if name != "logprobs":
      np.testing.assert_array_equal(getattr(halved, name), of_whole)
  np.testing.assert_allclose(halved.logprobs, whole.logprobs, atol=2e-6)


@pytest.mark.slow
def test_two_threads_ask_for_a_half_each(tiny):
  program, calls, mesh = program_of(tiny.lm), [], one_device()

  def called(params, prompts, *rest):
    shape = prompts.prompt_ids.shape
    set_here = jax.sharding.get_abstract_mesh()
    calls.append((shape, threading.get_ident(), set_here))
    return program(params, prompts, *rest)

  with jax.set_mesh(mesh):
    sampling_lib.sample_halves(functools.partial(called), mesh)(
      tiny.params, prompts_of(6), jax.random.key(0)
    )
  (one, mine, here), (two, other, there) = calls
  assert one == two == (3, 3)
  assert mine == threading.get_ident() != other
  assert here == there == mesh.abstract_mesh


def test_what_fails_in_the_other_thread_is_raised(tiny):
  def fails(params, prompts, key, first):
    if first:
      raise KeyError("the second half")

  with pytest.raises(KeyError, match="second half"):
    sampling_lib.sample_halves(functools.partial(fails), None)(
      tiny.params, prompts_of(2), jax.random.key(0)
    )


def test_where_it_pays(monkeypatch):
  small = jnp.zeros((sampling_lib.LARGEST_HALVED // 8 // 4, 4), jnp.float32)
  cpu, tpu = jax.devices("cpu")[:1], [types.SimpleNamespace(platform="tpu")]
  assert sampling_lib.halves_pay((small, small), 4, cpu)
  assert not sampling_lib.halves_pay(small, 3, cpu)  # no two equal halves
  assert not sampling_lib.halves_pay((small, small, jnp.zeros(1)), 4, cpu)
  assert not sampling_lib.halves_pay(small, 4, 2 * cpu)
  assert not sampling_lib.halves_pay(small, 4, tpu)
  name = "jax_cpu_enable_async_dispatch"
  jax.config.update(name, False)
  waiting = sampling_lib.halves_pay(small, 4, cpu)
  jax.config.update(name, True)
  assert not waiting
  monkeypatch.setattr(os, "cpu_count", lambda: 1)
  assert not sampling_lib.halves_pay(small, 4, cpu)
