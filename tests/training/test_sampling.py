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
from grpojax.training.step import sampling, scoring
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
def scored(tabular, word_policy, one_device, settings_with):
  """`(function, parts)` -> samples and rewards of prompts of kinds 0 to 3."""
  lm = tabular.lm(B, 7)
  policy = word_policy(lm)

  def scored(function, parts):
    settings = settings_with(
      sampling__parts=parts,
      sampling__max_new_tokens=T,
      reward__functions=(function,),
      reward__workers=1,
      batch_size=B,
      group_size=G,
      optim__micro_batches=1,
    )
    distribution = settings.sampling.distribution
    args = settings, policy, G, distribution, one_device
    sampler = sampling.make_sampler(*args)
    ids = jnp.arange(B)[:, None]
    prompts = meshes.place(Prompts(ids, ids >= 0), one_device, "batch")
    table = lm.init(jax.random.key(0))
    timer = Timer()
    pool = scoring.open_reward_pool(settings)
    with pool as reward_pool, jax.set_mesh(one_device):
      check = lambda: None
      source = Source(policy, sampler, reward_pool, one_device, check, parts)
      args = source, table, prompts, EXAMPLES, jax.random.key(1), timer
      samples, rewards, *_ = draw(*args).collect()
    assert list(timer.seconds) == ["rollout", "rewards"]
    return jax.device_get(samples), rewards

  return scored


@pytest.mark.slow
def test_rewards_begin_before_the_next_part_is_sampled(
  scored, rewards, monkeypatch
):
  name, begun = rewards
  events = []
  wait = policies.wait
  on_sampling_mesh = sampling.on_sampling_mesh

  def recorded(*args):
    sampler = on_sampling_mesh(*args)
    return lambda *args: events.append("sampling") or sampler(*args)

  def wait_and_record(part, check_signals):
    """Delays the second part until a reward of the first part starts."""
    until = time.monotonic() + 20
    while "ready" in events and not begun.exists():
      assert time.monotonic() < until, "no reward has started"
      time.sleep(0.01)
    wait(part, check_signals)
    events.append("ready")

  with monkeypatch.context() as patch:
    patch.setattr(sampling, "LARGEST_HALVED", 0)  # a part, a program
    patch.setattr(sampling, "on_sampling_mesh", recorded)
    patch.setattr(policies, "wait", wait_and_record)
    parts = scored(name, 2)
  whole = scored(name, 1)
  assert events == ["sampling", "sampling", "ready", "ready"]
  # Samples, rewards, failures and their order are the same.
  jax.tree.map(np.testing.assert_array_equal, parts[0], whole[0])
  jax.tree.map(np.testing.assert_array_equal, parts[1][:3], whole[1][:3])
  failures = [all_failures(rewards) for _, rewards in (parts, whole)]
  assert failures[0] == failures[1] and len(failures[1]) > 1
