"""The example programs compute the same as the library."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import grpojax
from grpojax.examples import grpo_in_one_file as example
from grpojax.training.policies import Policy

SIZES = {"BATCH_SIZE": 2, "GROUP_SIZE": 4, "COMPLETION_TOKENS": 6}


@pytest.fixture
def small(monkeypatch):
  for name, size in SIZES.items():
    monkeypatch.setattr(example, name, size)


def test_one_file_equals_make_grpo_step(tiny, small):
  policy = Policy(None, tiny.lm, None, eos_ids=(0,), pad_id=3)
  tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
  ids = jnp.array([[1, 2, 3], [4, 5, 3]])
  prompts = grpojax.Prompts(ids, jnp.array([[True] * 3, [True, True, False]]))
  reward = lambda samples, _: (samples.completion_ids % 2).mean(-1)
  step = grpojax.make_grpo_step(
    tiny.lm,
    tx,
    reward,
    group_size=4,
    max_new_tokens=6,
    eos_ids=0,
    pad_id=3,
  )
  state = grpojax.init_state(tiny.params, tx, jax.random.key(0))
  expected, metrics = jax.jit(step)(state, prompts)
  key = jax.random.fold_in(state.key, 0)
  samples = example.make_sample(policy)(tiny.params, prompts, key)
  learn = example.make_learn(tiny.lm, tx)
  params, _ = learn(
    tiny.params, tx.init(tiny.params), samples, reward(samples, None)
  )
  assert metrics["grad_norm"] > 0.1 and samples.finished.any()
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, params, expected.params)
  moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), params, tiny.params)
  assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
def test_one_file_rewards_right_answers(small, capsys, monkeypatch):
  monkeypatch.setattr(example, "BATCH_SIZE", 8)
  monkeypatch.setattr(example, "COMPLETION_TOKENS", 64)
  example.main(1)
  shares = re.findall(r"(\d+)%", capsys.readouterr().out)
  assert len(shares) == 3 and all(0 < int(x) < 100 for x in shares)
