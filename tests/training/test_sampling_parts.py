"""Samples in parts: the same ones, scored while the next part decodes."""

import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Prompts
from grpojax.environments.episodes import play_together
from grpojax.rewards import groups
from grpojax.training import policy as policy_lib
from grpojax.training.config import from_config
from grpojax.training.settings import batches as batches_lib
from grpojax.training.step import host
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib
from grpojax.training.step.timer import Timer

B, G, T = 4, 3, 6
EXAMPLES = [{"prompt_text": str(i), "answer": "1"} for i in range(B)]


@pytest.fixture
def rewards(tmp_path):
  """A function of text that fails for some, and says when it has begun."""
  file, begun = tmp_path / "rewards.py", tmp_path / "begun"
  file.write_text(
    f"import pathlib\ndef count(prompt, completion, example):\n"
    f"  pathlib.Path({str(begun)!r}).touch()\n"
    "  if completion.startswith('3'):\n    raise KeyError(completion)\n"
    "  return float(len(completion))\n"
  )
  return f"{file}:count", begun


@pytest.fixture
def scored(tabular, words):
  """Samples and rewards of prompts of kinds 0 to 3, of settings."""
  return functools.partial(sample_and_reward, tabular, words)


def sample_and_reward(
  tabular,
  words,
  settings,
  reward_pool,
  check_signals=lambda: None,
  on_call=lambda: None,
):
  lm = tabular.lm(B, 7)
  policy = policy_lib.Policy(pathlib.Path(), lm, words, (0,), 0)
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  program = sampling_lib.sampler_program(
    settings, policy, G, settings.sampling.distribution
  )

  def called(*args):
    on_call()
    return program(*args)

  sampler = sampling_lib.on_sampling_mesh(functools.partial(called), mesh, mesh)
  run = host.make_sample_and_reward(
    policy,
    sampler,
    mesh,
    reward_pool,
    check_signals,
    None,
    settings.sampling.parts,
  )
  ids = jnp.arange(B)[:, None]
  prompts = mesh_lib.place(Prompts(ids, ids >= 0), mesh, "batch")
  table, timer = lm.init(jax.random.key(0)), Timer()
  with jax.set_mesh(mesh):
    drawing = run(table, prompts, EXAMPLES, jax.random.key(1), timer)
    samples, rewards = play_together(drawing)[0]
  assert list(timer.seconds) == ["rollout", "rewards"]
  return jax.device_get(samples), rewards


def config_of(config_with, parts, name):
  return config_with(
    sampling__parts=parts,
    sampling__max_new_tokens=T,
    reward__functions=(name,),
    reward__workers=1,
    batch_size=B,
    group_size=G,
    optim__micro_batches=1,
  )


@pytest.mark.slow
def test_rewards_begin_before_the_next_part_is_sampled(
  scored, config_with, rewards, monkeypatch
):
  name, begun = rewards
  settings = from_config(config_of(config_with, 2, name))
  events, wait = [], policy_lib.wait
  # A part is one program.
  monkeypatch.setattr(sampling_lib, "LARGEST_HALVED", 0)

  def wait_and_record(part, check_signals):
    """The second part is ready when a reward of the first has begun."""
    until = time.monotonic() + 20
    while "ready" in events and not begun.exists():
      assert time.monotonic() < until, "no reward has begun"
      time.sleep(0.01)
    wait(part, check_signals)
    events.append("ready")

  with rewards_lib.open_reward_pool(settings) as reward_pool:
    monkeypatch.setattr(policy_lib, "wait", wait_and_record)
    parts = scored(
      settings, reward_pool, on_call=lambda: events.append("sampling")
    )
    monkeypatch.undo()
    one_part = from_config(config_of(config_with, 1, name))
    whole = scored(one_part, reward_pool)
  assert events == ["sampling", "sampling", "ready", "ready"]
  # Nothing else changed: samples, texts, rewards, failures and their order.
  jax.tree.map(np.testing.assert_array_equal, parts[0], whole[0])
  jax.tree.map(np.testing.assert_array_equal, parts[1][:3], whole[1][:3])
  failures = [groups.all_failures(rewards) for _, rewards in (parts, whole)]
  assert failures[0] == failures[1] and len(failures[1]) > 1


@pytest.mark.slow
def test_what_is_being_computed_is_abandoned(scored, config_with, rewards):
  name, begun = rewards
  settings = from_config(config_of(config_with, 2, name))
  sent = []

  def check_signals():
    if sent:  # the first part is with the workers
      raise KeyError

  with rewards_lib.open_reward_pool(settings) as reward_pool:
    submit = reward_pool.pool.submit
    reward_pool.pool.submit = lambda *x: sent.append(submit(*x)) or sent[-1]
    with pytest.raises(KeyError):
      scored(settings, reward_pool, check_signals)
  (submission,) = sent
  assert submission.abandoned


def test_a_part_must_fit_the_mesh(config_with):
  config = config_of(config_with, 4, "exact_answer")
  mesh = jax.sharding.Mesh(
    np.array([jax.devices()[0]] * 2).reshape(2, 1, 1, 1), mesh_lib.AXES
  )
  config.group_size = 2
  batches_lib.check_mesh(from_config(config), mesh)  # groups can be cut
  config.group_size = 3
  with pytest.raises(ValueError, match="rollout: 1 prompts x 3 samples"):
    batches_lib.check_mesh(from_config(config), mesh)
