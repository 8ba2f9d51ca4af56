"""Wrong arguments of library calls raise a readable error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import grpojax
from grpojax.core import advantages
from grpojax.core.advantages.baselines import shrinkage
from grpojax.core.advantages.multi_reward import normalize_then_sum
from grpojax.core.advantages.subsets import max_at_k
from grpojax.core.advantages.weighted_baselines import (
  length_weighted,
  score_weighted,
)
from grpojax.core.arguments import check_read_prompts, read_ends
from grpojax.core.batch import make_batch
from grpojax.core.binding import bind
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.group_axis import as_float
from grpojax.core.logprobs import token_logprobs
from grpojax.core.losses import grpo_loss
from grpojax.core.losses.rollout_correction import make_correction
from grpojax.core.objective import Objective
from grpojax.core.rollout import rollout, rollout_metrics
from grpojax.core.step import init_state, make_grpo_step
from grpojax.core.types import Batch, Prompts
from grpojax.core.update import UpdateOptions

KEY = jax.random.key(5)
B = 4
G = 3
T = 2


@pytest.fixture(scope="module")
def case(tabular):
  """A model with 5 tokens, its parameters, and a sampling function."""
  lm = tabular.lm(2, 5)
  draw = functools.partial(
    rollout, lm, lm.init(KEY), group_size=G, max_new_tokens=T, eos_ids=(0,)
  )
  return lm, lm.init(KEY), draw


RIGHT = jnp.array([[True, True, False]] * B)
IDS = jnp.ones((B, 3), jnp.int32)

WRONG = {
  "left-padded": (IDS, RIGHT[:, ::-1], "row 0 is not.*_from_left_padded"),
  "holes": (IDS, RIGHT.at[2, 2].set(True).at[2, 1].set(False), "row 2 is not"),
  "negative": (IDS.at[1, 0].set(-1), RIGHT, r"\[1, 0\] = -1 is .* 0 to 4"),
  "too large": (IDS.at[3, 1].set(5), RIGHT, r"\[3, 1\] = 5 is outside"),
  "no tokens": (IDS, RIGHT & False, "no prompt has a token"),
  "integers": (IDS, RIGHT.astype(int), r"not int32: give .*astype\(bool\)"),
  "floats": (IDS * 1.0, RIGHT, "prompt_ids must be integers, not float32"),
  "shapes": (IDS, RIGHT[:, :2], r"not \(4, 3\) and \(4, 2\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_prompts_are_refused(case, wrong):
  lm, params, draw = case
  ids, mask, words = WRONG[wrong]
  with pytest.raises(ValueError, match=words):
    draw(Prompts(ids, mask), KEY)
  with pytest.raises(ValueError, match=words):
    grpojax.check_prompts(Prompts(ids, mask), 5)
  if wrong not in ("negative", "too large"):  # wrong for any model
    with pytest.raises(ValueError, match=words):
      Prompts(ids, mask)
    jax.eval_shape(lambda ids, mask: Prompts(ids, mask), ids, mask)
  typed = ids.dtype == jnp.int32 and mask.dtype == bool
  if typed and mask.shape == ids.shape:  # else the annotations refuse them
    completions = jnp.zeros((B, G, T), jnp.int32)
    with pytest.raises(ValueError, match=words):
      token_logprobs(lm, params, ids, mask, completions)


def test_prompts_are_not_checked_inside_transformations():
  prompts = Prompts(IDS, RIGHT, {"answer": jnp.ones(B)})
  stacked = jax.tree.map(lambda x: jnp.stack([x] * 2), prompts)
  Prompts(**vars(stacked))
  _, first = jax.lax.scan(lambda _, p: (None, p), None, stacked)
  axes = jax.tree.map(lambda _: 0, prompts)
  mapped = jax.vmap(lambda p: p, in_axes=(axes,))(prompts)
  for other in (jax.tree.map(lambda x: x[0], first), mapped):
    jax.tree.map(np.testing.assert_array_equal, other, prompts)
  left = jax.jit(lambda p: p.replace(prompt_mask=p.prompt_mask[:, ::-1]))
  assert not left(prompts).prompt_mask[0, 0]
  with pytest.raises(ValueError, match="row 0 is not"):
    prompts.replace(prompt_mask=RIGHT[:, ::-1])
  path, _ = jax.tree.leaves_with_path(prompts)[-1]
  assert jax.tree_util.keystr(path) == ".targets['answer']"


def make_step(lm, reward=lambda samples, _: jnp.zeros((B, G)), **options):
  options = {"group_size": G, "max_new_tokens": T, "eos_ids": 0} | options
  return make_grpo_step(lm, optax.sgd(1.0), reward, **options)


def trace(lm, *reward, **options):
  """Traces a step of a simple optimizer."""
  state = init_state(lm.init(KEY), optax.sgd(1.0), KEY)
  jax.eval_shape(make_step(lm, *reward, **options), state, Prompts(IDS, RIGHT))


def begin(tx, *dtype, key=KEY):
  init_state({"w": jnp.ones(2, *dtype)}, tx, key)


def bare(function):
  """Removes the run-time annotation checks, which only tests have."""
  return getattr(function, "__wrapped__", function)


ONES = jnp.ones((2, 3, 4))
TWO = jnp.ones((2, 4))
of_tokens = functools.partial(Objective, "optimal_token_baseline")
LOSS = dict(logprobs=ONES, advantages=ONES[..., 0], weights=ONES, mask=ONES > 0)
SHAPES = r"advantages \[B, G\]"
SHORT = {"group_size": 1, "max_new_tokens": 1, "eos_ids": 0}
HOST = "reward_fn reads .*on the host"
OPTIMIZER = "the optimizer is called as"
UNKNOWN_END = "outside the model's vocabulary"
NO_KEY = r"give jax.random.key\(seed\)"
REFUSED = [
  # Unknown names.
  ("did you mean clip_high", lambda lm: Objective(clip_hi=0.3)),
  ("did you mean minibatches", lambda lm: UpdateOptions(minibatch=2)),
  ("use one of advantage, subset_size", lambda lm: Objective(zzz=1)),
  (r"objective=Objective\(beta=", lambda lm: make_step(lm, beta=1)),
  # Options are checked when they are made.
  (r"^temperature = -1.0: must be ", lambda lm: Sampling(-1.0)),
  (r"^epochs = 0: must be ", lambda lm: UpdateOptions(epochs=0)),
  (r"^dual_clip = 0.5: .* than 1, or 0", lambda lm: Objective(dual_clip=0.5)),
  (r"^correction_high = 0.5: ", lambda lm: Objective(correction_high=0.5)),
  (r"^advantage = 'oracle': needs the true", lambda lm: Objective("oracle")),
  # Rewards on the host, and an error of the user's function.
  (HOST, lambda lm: trace(lm, lambda x, _: np.asarray(x.logprobs).sum(-1))),
  (HOST, lambda lm: trace(lm, lambda x, _: {1: 2.0}[x.completion_ids])),
  ("takes 1 positional argument", lambda lm: trace(lm, lambda samples: 0.0)),
  # Invalid values.
  (
    r"step\(state, prompts, ref_params\)",
    lambda lm: trace(lm, objective=Objective(beta=0.1)),
  ),
  (UNKNOWN_END, lambda lm: trace(lm, eos_ids=(0, -1))),
  (UNKNOWN_END, lambda lm: trace(lm, eos_ids=2**31)),
  (
    r"tuple: give grpojax.Prompts\(",  # before annotations are checked
    lambda lm: rollout.__wrapped__(lm, 0, (IDS, RIGHT), KEY, **SHORT),
  ),
  (
    r"targets.a has the shape \(3, 2\)",
    lambda lm: Prompts(IDS, RIGHT, targets={"a": np.ones((3, 2))}),
  ),
  (
    r"weights has the shape \(5,\): .*\(4,\)",
    lambda lm: Prompts(IDS, RIGHT, weights=np.ones(5)),
  ),
  (OPTIMIZER, lambda lm: begin(optax.lbfgs())),
  (OPTIMIZER, lambda lm: begin(optax.lookahead(optax.sgd(1.0), 3, 0.5))),
  (r"parameter \['w'\] is", lambda lm: begin(optax.adam(1.0), jnp.float16)),
  (NO_KEY, lambda lm: begin(optax.sgd(1.0), key=jnp.zeros(()))),
  (NO_KEY, lambda lm: begin(optax.sgd(1.0), key=jax.random.split(KEY))),
  ("group_size=0", lambda lm: trace(lm, group_size=0)),
  ("max_new_tokens=0", lambda lm: trace(lm, max_new_tokens=0)),
  ("eos_ids is empty", lambda lm: trace(lm, eos_ids=())),
  (
    r"budgets has shape \(4, 3\), not \(4, 1\)",
    lambda lm: rollout(
      lm, lm.init(KEY), Prompts(IDS, RIGHT), KEY, budgets=IDS, **SHORT
    ),
  ),
  # Advantages and losses.
  (
    "the batch has none",
    lambda lm: make_correction("token_mask")(
      ONES, Batch(None, None, None, ONES > 0, ONES[..., 0])
    ),
  ),
  ("is per token: .*use", lambda lm: of_tokens(surrogate="gmpo")),
  ("is per token: .*use", lambda lm: of_tokens(off_policy_threshold=0.1)),
  ("rewards", lambda lm: bare(advantages.vanilla)(jnp.float32(1.0))),
  (r"need values \(2,\)", lambda lm: bare(advantages.oracle)(TWO, TWO)),
  ("need logit_score_sq of", lambda lm: bare(score_weighted)(TWO, ONES[0])),
  ("need lengths of", lambda lm: bare(length_weighted)(TWO, ONES[0])),
  ("at least 3 prompts, not 2", lambda lm: shrinkage(TWO)),
  ("not k = 0", lambda lm: max_at_k(TWO, k=0)),
  ("one weight per reward", lambda lm: normalize_then_sum(ONES, [1.0])),
  ("group size G >= 2", lambda lm: normalize_then_sum(ONES[..., :1], [1, 2])),
  ("needs ref_logprobs", lambda lm: grpo_loss(**LOSS, beta=0.1)),
  (SHAPES, lambda lm: bare(grpo_loss)(**LOSS | {"advantages": TWO})),
  (SHAPES, lambda lm: bare(grpo_loss)(**LOSS | {"weights": ONES[:1]})),
  (SHAPES, lambda lm: bare(grpo_loss)(**LOSS, old_logprobs=ONES[..., :1])),
]


@pytest.mark.parametrize("words, call", REFUSED)
def test_a_wrong_argument_is_refused(case, words, call):
  with pytest.raises((TypeError, ValueError), match=words):
    call(case[0])


@pytest.mark.slow
def test_unused_values_are_not_checked(case):
  """Ids on padding, padding rows, and values inside jit."""
  lm, params, draw = case
  ids = IDS.at[:, 2].set(-7).at[3].set(99)
  prompts = Prompts(ids, RIGHT.at[3].set(False))
  check_read_prompts(lm, params, prompts.prompt_ids, prompts.prompt_mask)
  samples = jax.jit(draw)(prompts, KEY)
  assert samples.completion_mask[:3].any()
  assert not samples.completion_mask[3].any()
  jax.eval_shape(lambda mask: draw(Prompts(IDS, mask), KEY), RIGHT[:, ::-1])
  # The reward of a padding row is ignored.
  rewards = jnp.arange(B * G).reshape(B, G)
  batch_std = grpojax.advantages.batch_std
  objective = Objective(advantage="batch_std")
  # Rewards may be lists.
  actual = make_batch(lm, samples, rewards.tolist(), objective).advantages
  expected = jax.jit(batch_std)(rewards[:3])
  np.testing.assert_allclose(actual[:3], expected, rtol=1e-6)
  assert (actual[3] == 0).all()


def test_prompts_from_left_padded():
  ids = np.array([[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 9]])
  mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
  prompts = grpojax.prompts_from_left_padded(ids, mask, targets=ids[:, 0])
  np.testing.assert_array_equal(prompts.prompt_mask, mask[:, [2, 3, 0, 1]])
  expected = ids[:, [2, 3, 0, 1]]
  expected[1] = ids[1]
  np.testing.assert_array_equal(prompts.prompt_ids, expected)
  np.testing.assert_array_equal(prompts.targets, ids[:, 0])


def test_eos_ids_may_be_a_single_integer():
  for eos in (0, np.int64(0), np.array([0]), [0], (np.int32(0),)):
    assert read_ends(eos).ids.tolist() == [0]
  for eos in ((), None, "1", (1.5,), [[1]]):
    with pytest.raises(ValueError, match="eos_ids "):
      read_ends(eos)


BAD_REWARDS = {
  "none": (None, "numbers"),
  "ragged": ([[1.0], [1.0, 2.0]], "equal lengths"),
  "texts": ([["a"] * G] * B, "numbers"),
  "per prompt": (np.zeros(B), r"\[B, G\] = \(4, 3\).* not shape \(4,\)"),
}


@pytest.mark.parametrize("bad", BAD_REWARDS)
def test_rewards_of_a_wrong_shape_or_type_are_refused(case, bad):
  lm, _, draw = case
  rewards, words = BAD_REWARDS[bad]
  samples = jax.eval_shape(draw, Prompts(IDS, RIGHT), KEY)
  with pytest.raises(ValueError, match=f"make_batch needs rewards.*{words}"):
    jax.eval_shape(lambda s: make_batch(lm, s, rewards), samples)
  with pytest.raises(ValueError, match=f"rollout_metrics needs.*{words}"):
    jax.eval_shape(lambda s: rollout_metrics(s, rewards), samples)
  with pytest.raises(ValueError, match=f"reward_fn needs rewards.*{words}"):
    trace(lm, lambda samples, targets: rewards)
  if not isinstance(rewards, np.ndarray):  # [N] may be a single group
    with pytest.raises(ValueError, match=f"grpo needs rewards.*{words}"):
      as_float(rewards, "grpo", least=2)


def test_a_callable_without_a_signature_gets_no_settings():
  for function in (abs, dict, map, max):
    assert bind(function, lengths=1) is function
