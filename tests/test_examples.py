"""The example programs compute the same as the library."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import grpojax
from grpojax.examples import grpo_in_one_file as example
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy

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
def test_one_file_prints_accuracies(small, capsys):
  example.main(1)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("step 0: 0% right")  # 6 tokens are too few
  assert lines[1] == "held out: 0% -> 0% right"


@pytest.mark.slow
def test_one_file_rewards_correct_answers():
  policy = policy_lib.load_policy(example.MODEL)
  texts = [["#### 4", "2+2=4\n#### 5"], ["7", "#### 7"]]
  encode = lambda text: [*policy.tokenizer.encode(text), policy.eos_ids[0]]
  rows = [[encode(text) for text in group] for group in texts]
  ids = np.full((2, 2, 20), policy.pad_id)
  mask = np.zeros(ids.shape, bool)
  for row, member in np.ndindex(2, 2):
    tokens = rows[row][member]
    ids[row, member, : len(tokens)] = tokens
    mask[row, member, : len(tokens)] = True
  examples = [{"answer": "4"}, {"answer": "7"}]
  prompts = example.make_prompts(policy, [{"prompt": "1+2"}, {"prompt": "3"}])
  samples = grpojax.Rollout(
    prompts.prompt_ids, prompts.prompt_mask, ids, mask, None, mask.any(-1)
  )
  rewards = example.compute_rewards(policy, samples, examples)
  np.testing.assert_array_equal(rewards, [[1, 0], [0, 1]])
  shown = [
    policy.tokenizer.decode(ids[mask])
    for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
  ]
  assert shown == ["Q: 1+2\nA: ", "Q: 3\nA: "]
