import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts

LENGTHS = np.array([4, 2, 3])
PROMPTS = Prompts(
  prompt_ids=jnp.asarray(np.random.default_rng(0).integers(1, 11, (3, 4))),
  prompt_mask=jnp.arange(4) < LENGTHS[:, None],
)
KEY = jax.random.key(7)
EOS = (0, 5)
SIX = {"group_size": 6, "max_new_tokens": 5, "eos_ids": EOS}


@pytest.fixture(scope="module")
def tiny_rollout(tiny):
  """Six samples of at most five tokens per prompt."""
  run = jax.jit(functools.partial(rollout, tiny.lm, pad_id=9, **SIX))
  return functools.partial(run, tiny.params)


def chain(successor, vocab=4):
  """Returns the table of a chain.

  `successor[0]` is the first token; `successor[1 + i]` follows token i.
  """
  return 100.0 * jax.nn.one_hot(jnp.array([successor]), vocab)


def run_chain(lm, table, batch=1, prompts=None, budgets=None, **kwargs):
  """Returns a rollout of a tabular policy on prompts of kinds 0, 1, ..."""
  if prompts is None:
    prompts = Prompts(jnp.arange(batch)[:, None], jnp.ones((batch, 1), bool))
  settings = {"group_size": 3, "max_new_tokens": 6, "eos_ids": (0,)} | kwargs
  # Jitted, because a chain has more kinds of prompts than tokens.
  run = jax.jit(functools.partial(rollout, lm, **settings))
  return run(table, prompts, KEY, budgets=budgets)


def fields(out):
  names = ("completion_ids", "completion_mask", "logprobs", "finished")
  return [np.asarray(getattr(out, name)) for name in names]


# Log-probabilities and the distribution.


@pytest.mark.parametrize(
  "sampling",
  [
    pytest.param(Sampling(), marks=pytest.mark.slow),
    pytest.param(Sampling(temperature=0.0), marks=pytest.mark.slow),
    Sampling(temperature=1.4, top_k=6, top_p=0.9, min_p=0.05),
  ],
)
def test_rollout_and_trainer_logprobs_agree(tiny, sampling):
  """The rollout computes them from the cache, the trainer without it."""

  @jax.jit
  def both(params):
    out = rollout(tiny.lm, params, PROMPTS, KEY, sampling=sampling, **SIX)
    prompts = PROMPTS.prompt_ids, PROMPTS.prompt_mask
    logprobs, _ = token_logprobs(
      tiny.lm, params, *prompts, out.completion_ids, sampling=sampling
    )
    return out, logprobs

  out, recomputed = both(tiny.params)
  mask = np.asarray(out.completion_mask)
  assert mask.sum() > 30 and not mask.all()
  assert_allclose(out.logprobs, np.where(mask, recomputed, 0), atol=2e-5)


def test_completions_have_the_policys_distribution(tabular):
  """By the chi-square distance from all completions' probabilities."""
  lm = tabular.lm(1, 3)
  n = 8000
  table = lm.init(jax.random.key(3))
  out = run_chain(lm, table, group_size=n, max_new_tokens=3)
  log_table = tabular.log_table(table)[0]
  exact = {}
  for ids in itertools.product(range(3), repeat=3):
    end = ids.index(0) + 1 if 0 in ids else 3
    before = (0, *(1 + i for i in ids))[:end]
    exact[ids[:end]] = np.exp(sum(log_table[before, ids[:end]]))
  assert_allclose(sum(exact.values()), 1)
  ids = np.asarray(out.completion_ids[0])
  mask = np.asarray(out.completion_mask[0])
  drawn = [
    tuple(map(int, row[keep])) for row, keep in zip(ids, mask, strict=True)
  ]
  counts = collections.Counter(drawn)
  assert counts.keys() <= exact.keys()
  chi_square = sum((counts[y] - n * p) ** 2 / (n * p) for y, p in exact.items())
  freedom = len(exact) - 1
  assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
  total = np.asarray(out.logprobs[0], np.float64).sum(-1)
  assert_allclose(total, [np.log(exact[y]) for y in drawn], atol=1e-4)


# Ends of completions.


ENDS = [
  # successors, budget, completion, finished; 0 and 4 are EOS, T = 4
  ([1, 3, 2, 0, 3, 3], 4, [1, 2, 0], True),
  ([1, 3, 2, 4, 3, 3], 4, [1, 2, 4], True),  # Another EOS.
  ([0, 1, 1, 1, 1, 1], 4, [0], True),  # The first token.
  ([1, 3, 2, 0, 3, 3], 3, [1, 2, 0], True),  # At the budget.
  ([1, 3, 2, 0, 3, 3], 2, [1, 2], False),  # Cut off.
  ([1, 3, 2, 0, 3, 3], 0, [], False),
  ([1, 1, 2, 1, 1, 1], 4, [1, 2, 1, 2], False),  # Never.
  ([1, 1, 2, 1, 1, 1], 9, [1, 2, 1, 2], False),
]


@pytest.mark.slow
@pytest.mark.parametrize("pad_id", [0, 3])
def test_completions_end_at_an_eos_or_the_budget(tabular, pad_id):
  """Also if the padding is an EOS."""
  successors, budgets, completions, finished = zip(*ENDS, strict=True)
  count = len(ENDS)
  out = run_chain(
    tabular.lm(count, 5),
    jnp.concatenate([chain(s, vocab=5) for s in successors]),
    batch=count,
    max_new_tokens=4,
    eos_ids=(0, 4),
    pad_id=pad_id,
    budgets=jnp.broadcast_to(jnp.array(budgets)[:, None], (count, 3)),
  )
  for b, expected in enumerate(completions):
    n = len(expected)
    row = expected + [pad_id] * (4 - n)
    assert_array_equal(out.completion_ids[b], [row] * 3)
    mask = [[True] * n + [False] * (4 - n)] * 3
    assert_array_equal(out.completion_mask[b], mask)
    assert_array_equal(out.finished[b], [finished[b]] * 3)
  assert_allclose(out.logprobs, 0, atol=1e-6)


# Independence of the rest of the batch.


IDS = PROMPTS.prompt_ids
MASK = PROMPTS.prompt_mask
CHANGES = {  # prompts, and the rows whose samples stay the same
  "other rows": (Prompts(IDS.at[::2].set(3), MASK.at[::2, 1:].set(False)), [1]),
  "a row of padding": (Prompts(IDS, MASK.at[1].set(False)), [0, 2]),
  "padding of prompts": (
    Prompts(
      jnp.pad(jnp.where(MASK, IDS, 8), ((0, 0), (0, 3)), constant_values=7),
      jnp.pad(MASK, ((0, 0), (0, 3))),
    ),
    [0, 1, 2],
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_samples_depend_only_on_their_prompt(tiny_rollout, change):
  prompts, same = CHANGES[change]
  changed = tiny_rollout(prompts, KEY)
  out = fields(tiny_rollout(PROMPTS, KEY))
  for got, expected in zip(fields(changed), out, strict=True):
    assert_allclose(got[same], expected[same], atol=1e-5)
  if change == "other rows":
    assert (changed.completion_ids[0] != out[0][0]).any()
  if change == "a row of padding":
    assert (
      not changed.completion_mask[1].any() and not changed.finished[1].any()
    )
    assert (changed.completion_ids[1] == 9).all()
    assert (changed.logprobs[1] == 0).all()
