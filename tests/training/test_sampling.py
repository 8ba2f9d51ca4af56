"""Sampling in halves or parts has the same samples and rewards."""

import contextlib
import functools
import os
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import meshes
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.rewards.pool import all_failures
from grpojax.training import policies
from grpojax.training.step import episodes, sampling, scoring
from grpojax.training.step.draws import Source, Timer, draw

B = 4
G = 3
T = 6
EXAMPLES = [{"prompt_text": str(i), "answer": "1"} for i in range(B)]

# Halves.


@pytest.fixture
def two_cores(monkeypatch):
  monkeypatch.setattr(os, "cpu_count", lambda: 2)


def prompts_of(rows):
  ids = 2 + jnp.arange(3 * rows).reshape(rows, 3) % 7
  return Prompts(ids, jnp.arange(3) < 1 + jnp.arange(rows)[:, None] % 3)


def program_of(lm):
  """A program like `sampling.sampler_program`, without frozen weights."""
  options = {"group_size": 3, "max_new_tokens": 9, "eos_ids": (1,)}

  def sample(params, prompts, key, first=0):
    return rollout(lm, params, prompts, key, first_prompt=first, **options)

  return functools.partial(jax.jit(sample))


@pytest.mark.slow
@pytest.mark.parametrize(
  "on_mesh", [True, pytest.param(False, marks=pytest.mark.long)]
)
def test_halves_of_two_threads_equal_the_whole(
  tiny, two_cores, one_device, on_mesh
):
  program = program_of(tiny.lm)
  calls = []

  def called(params, prompts, *args):
    thread_mesh = jax.sharding.get_abstract_mesh()
    calls.append((prompts.prompt_ids.shape, threading.get_ident(), thread_mesh))
    return program(params, prompts, *args)

  first = (jnp.int32(5),) if on_mesh else ()
  args = tiny.params, prompts_of(4), jax.random.key(3), *first
  mesh = one_device if on_mesh else None
  with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
    sampler = sampling.sample_halves(functools.partial(called), mesh)
    halved = sampler(*args)
    whole = program(*args)
  shapes, threads, seen = zip(*calls, strict=True)
  assert shapes == ((2, 3), (2, 3))
  assert threads[0] == threading.get_ident() != threads[1]
  assert seen[0] == seen[1] == (mesh.abstract_mesh if mesh else seen[0])
  for name, value in vars(whole).items():
    if name != "logprobs":
      np.testing.assert_array_equal(getattr(halved, name), value)
  np.testing.assert_allclose(halved.logprobs, whole.logprobs, atol=2e-6)


def test_halves_need_small_weights_two_cores_and_async_dispatch(
  monkeypatch, two_cores
):
  small = jnp.zeros((sampling.LARGEST_HALVED // 8 // 4, 4), jnp.float32)
  cpu = jax.devices("cpu")[:1]
  tpu = [types.SimpleNamespace(platform="tpu")]
  pays = sampling.halves_pay
  assert pays((small, small), 4, cpu)
  assert not pays(small, 3, cpu)  # odd
  assert not pays((small, small, jnp.zeros(1)), 4, cpu)
  assert not pays(small, 4, 2 * cpu)
  assert not pays(small, 4, tpu)
  name = "jax_cpu_enable_async_dispatch"
  jax.config.update(name, False)
  waiting = pays(small, 4, cpu)
  jax.config.update(name, True)
  assert not waiting
  monkeypatch.setattr(os, "cpu_count", lambda: 1)
  assert not pays(small, 4, cpu)


# Parts.


@pytest.fixture
def rewards(tmp_path):
  """A function that fails for some texts, and touches a file at its start."""
  file = tmp_path / "rewards.py"
  begun = tmp_path / "begun"
  file.write_text(
    f"import pathlib\ndef count(prompt, completion, example):\n"
    f"  pathlib.Path({str(begun)!r}).touch()\n"
    "  if completion.startswith('3'):\n    raise KeyError(completion)\n"
    "  return float(len(completion))\n"
  )
  return f"{file}:count", begun


@pytest.fixture
def settings_of(settings_with):
  return lambda parts, name: settings_with(
    sampling__parts=parts,
    sampling__max_new_tokens=T,
    reward__functions=(name,),
    reward__workers=1,
    batch_size=B,
    group_size=G,
    optim__micro_batches=1,
  )


@pytest.fixture
def scored(tabular, word_policy, one_device):
  """Returns samples and rewards of prompts of kinds 0 to 3."""
  lm = tabular.lm(B, 7)
  mesh = one_device
  policy = word_policy(lm)

  def scored(settings, reward_pool, on_call=lambda: None):
    distribution = settings.sampling.distribution
    program = sampling.sampler_program(settings, policy, G, distribution)

    def called(*args):
      on_call()
      return program(*args)

    called = functools.partial(called)
    sampler = sampling.on_sampling_mesh(called, mesh, mesh)
    parts = settings.sampling.parts
    check = lambda: None

    def sample(params, prompts, examples, key, *first, check_signals):
      sampled = episodes.sampled(sampler(params, prompts, key, *first))
      yield sampled.rollout
      return sampled

    source = Source(policy, sample, reward_pool, mesh, check, parts)
    ids = jnp.arange(B)[:, None]
    prompts = meshes.place(Prompts(ids, ids >= 0), mesh, "batch")
    table = lm.init(jax.random.key(0))
    timer = Timer()
    with jax.set_mesh(mesh):
      args = source, table, prompts, EXAMPLES, jax.random.key(1), timer
      samples, rewards, *_ = draw(*args).collect()
    assert list(timer.seconds) == ["rollout", "rewards"]
    return jax.device_get(samples), rewards

  return scored


@pytest.mark.slow
def test_rewards_begin_before_the_next_part_is_sampled(
  scored, settings_of, rewards, monkeypatch
):
  name, begun = rewards
  settings = settings_of(2, name)
  events = []
  wait = policies.wait
  monkeypatch.setattr(sampling, "LARGEST_HALVED", 0)  # a part, a program

  def wait_and_record(part, check_signals):
    """Delays the second part until a reward of the first part starts."""
    until = time.monotonic() + 20
    while "ready" in events and not begun.exists():
      assert time.monotonic() < until, "no reward has started"
      time.sleep(0.01)
    wait(part, check_signals)
    events.append("ready")

  with scoring.open_reward_pool(settings) as reward_pool:
    monkeypatch.setattr(policies, "wait", wait_and_record)
    on_call = lambda: events.append("sampling")
    parts = scored(settings, reward_pool, on_call=on_call)
    monkeypatch.undo()
    whole = scored(settings_of(1, name), reward_pool)
  assert events == ["sampling", "sampling", "ready", "ready"]
  # Samples, rewards, failures and their order are the same.
  jax.tree.map(np.testing.assert_array_equal, parts[0], whole[0])
  jax.tree.map(np.testing.assert_array_equal, parts[1][:3], whole[1][:3])
  failures = [all_failures(rewards) for _, rewards in (parts, whole)]
  assert failures[0] == failures[1] and len(failures[1]) > 1
