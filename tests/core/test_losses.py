import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import losses, surrogates

WEIGHTINGS = {
  "sequence_mean": losses.sequence_mean,
  "token_mean": losses.token_mean,
  "fixed_length": lambda mask: losses.fixed_length(mask, 8),
  "sequence_sum": losses.sequence_sum,
}
RATIOS = list(surrogates.RATIOS.values())
MASK = jnp.array(
  [[[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]], bool
)


def random_case(seed, shape=(3, 4, 5)):
  """Log-probabilities of three policies, advantages and a ragged mask."""
  keys = jax.random.split(jax.random.key(seed), 5)
  logprobs, old, ref = (
    jnp.log(jax.random.uniform(k, shape, minval=0.05)) for k in keys[:3]
  )
  rewards = jax.random.normal(keys[3], shape[:-1])
  lengths = jax.random.randint(keys[4], (*shape[:-1], 1), 1, shape[-1] + 1)
  mask = jnp.arange(shape[-1]) < lengths
  return logprobs, old, ref, rewards, mask


# Weightings.


def test_weights_golden():
  expected = {  # Three sequences, of 3, 1 and 2 tokens; one row is padding.
    "sequence_mean": [1 / 9, 1 / 3, 1 / 6],
    "token_mean": [1 / 6, 1 / 6, 1 / 6],
    "fixed_length": [1 / 24, 1 / 24, 1 / 24],
    "sequence_sum": [1 / 3, 1 / 3, 1 / 3],
  }
  for name, weighting in WEIGHTINGS.items():
    weights = weighting(MASK)
    assert weights.shape == MASK.shape and weights.dtype == jnp.float32
    a, b, c = expected[name]
    np.testing.assert_allclose(
      weights,
      [[[a, a, a, 0], [b, 0, 0, 0]], [[c, c, 0, 0], [0, 0, 0, 0]]],
      rtol=1e-6,
    )


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_padding_changes_no_weight(name):
  """Neither padding tokens, nor padding samples, nor padding prompts."""
  weighting = jax.jit(WEIGHTINGS[name])
  padded = jnp.pad(MASK, ((0, 2), (0, 1), (0, 3)))
  np.testing.assert_array_equal(weighting(padded)[:2, :2, :4], weighting(MASK))


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_no_token_at_all_gives_zeros(name):
  assert (WEIGHTINGS[name](jnp.zeros((2, 3, 4), bool)) == 0).all()


@pytest.mark.parametrize("length", [0, -1.0])
def test_fixed_length_refuses_a_useless_length(length):
  with pytest.raises(ValueError, match="length > 0"):
    losses.fixed_length(MASK, length)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_micro_batches_only_add(name):
  logprobs, old, ref, rewards, mask = random_case(0)
  mask = mask.at[1, 2].set(False)

  def gradient(x, *rest):
    return jax.jit(
      jax.grad(lambda x, *rest: losses.grpo_loss(x, *rest, beta=0.1)[0])
    )(x, *rest)

  arrays = (logprobs, rewards, WEIGHTINGS[name](mask), mask, old, ref)
  parts = [gradient(*(x[i : i + 1] for x in arrays)) for i in range(3)]
  np.testing.assert_allclose(
    jnp.concatenate(parts), gradient(*arrays), atol=1e-6
  )
  shares = WEIGHTINGS[name](mask[:1])  # Per micro-batch, as must not be done.
  assert jnp.abs(shares - WEIGHTINGS[name](mask)[:1]).max() > 1e-3


# Ratios.


def test_ratios_golden():
  logprobs = jnp.log(jnp.array([[[0.6, 0.1, 0.5]]]))
  old = jnp.log(jnp.array([[[0.3, 0.2, 0.1]]]))
  mask = jnp.array([[[True, True, False]]])
  np.testing.assert_allclose(
    surrogates.token_ratio(logprobs, old, mask), [[[2, 0.5, 1]]], rtol=1e-6
  )
  np.testing.assert_allclose(
    surrogates.sequence_ratio(
      logprobs, jnp.log(jnp.full((1, 1, 3), 0.15)), mask
    ),
    [[[np.sqrt(0.06) / 0.15, np.sqrt(0.06) / 0.15, 1]]],
    rtol=1e-6,
  )


def test_sequence_ratio_is_gspo():
  """Value and gradient, against a loop over sequences."""
  logprobs, old, _, rewards, mask = random_case(1)
  old = logprobs + 0.3 * (old - logprobs)

  lengths = np.asarray(mask).sum(-1)

  def reference(x):
    total = 0.0
    for b, g in itertools.product(range(3), range(4)):
      n = lengths[b, g]
      s = jnp.exp((x[b, g, :n] - old[b, g, :n]).sum() / n)
      a = rewards[b, g]
      total += jnp.minimum(s * a, jnp.clip(s, 0.9, 1.2) * a)
    return -total / 12

  def ours(x):
    return losses.grpo_loss(
      x,
      rewards,
      losses.sequence_mean(mask),
      mask,
      old,
      ratio=surrogates.sequence_ratio,
      clip_low=0.1,
      clip_high=0.2,
    )

  (value, per_token), gradient = jax.jit(
    jax.value_and_grad(ours, has_aux=True)
  )(logprobs)
  assert (
    per_token["clip_fraction_low"].any()
    and per_token["clip_fraction_high"].any()
  )
  expected, expected_gradient = jax.jit(jax.value_and_grad(reference))(logprobs)
  np.testing.assert_allclose(value, expected, atol=1e-6)
  np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


# The surrogate.


def one_token(ratio, advantage, **kwargs):
  """Loss, gradient with respect to the log-probability, and flags."""
  mask, old = jnp.ones((1, 1, 1), bool), jnp.full((1, 1, 1), -1.5)

  def loss(x):
    return losses.grpo_loss(
      x, jnp.full((1, 1), advantage), jnp.ones((1, 1, 1)), mask, old, **kwargs
    )

  x = old + jnp.log(ratio)
  f = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, aux), gradient = f(x)
  flags = (
    bool(aux["clip_fraction_low"].item()),
    bool(aux["clip_fraction_high"].item()),
  )
  return value, gradient.item(), flags


@pytest.mark.parametrize(
  ("ratio", "advantage", "loss", "gradient", "flags"),
  [
    (1.0, 2.0, -2.0, -2.0, (False, False)),
    (1.1, 2.0, -2.2, -2.2, (False, False)),
    (1.5, 2.0, -2.6, 0.0, (False, True)),
    (0.5, 2.0, -1.0, -1.0, (False, False)),
    (0.5, -2.0, 1.6, 0.0, (True, False)),
    (1.5, -2.0, 3.0, 3.0, (False, False)),
    (5.0, -2.0, 6.0, 0.0, (False, False)),  # The dual clip.
    (5.0, 0.0, 0.0, 0.0, (False, False)),
  ],
)
def test_surrogate_golden(ratio, advantage, loss, gradient, flags):
  got = one_token(ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
  np.testing.assert_allclose(got[0], loss, rtol=1e-5)
  np.testing.assert_allclose(got[1], gradient, rtol=1e-5)
  assert got[2] == flags


def test_bounds_can_be_turned_off():
  value, gradient, flags = one_token(9.0, 2.0, clip_high=float("inf"))
  np.testing.assert_allclose([value, gradient], -18.0, rtol=1e-5)
  assert flags == (False, False)
  value, gradient, _ = one_token(9.0, -2.0)
  np.testing.assert_allclose([value, gradient], 18.0, rtol=1e-5)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_on_policy_gradient_is_reinforce(ratio, given, clip):
  """Also with no room at all between the bounds."""
  logprobs, _, _, rewards, mask = random_case(2)
  weights = losses.sequence_mean(mask)

  def ours(x):
    return losses.grpo_loss(
      x,
      rewards,
      weights,
      mask,
      logprobs if given else None,
      ratio=ratio,
      clip_low=clip,
      clip_high=clip,
    )

  def reinforce(x):
    return -jnp.sum(jnp.where(mask, weights * rewards[..., None] * x, 0.0))

  gradient, per_token = jax.jit(jax.grad(ours, has_aux=True))(logprobs)
  expected = jax.jit(jax.grad(reinforce))(logprobs)
  np.testing.assert_allclose(gradient, expected, atol=1e-6)
  assert (per_token["ratio"] == 1).all()
  assert not (
    per_token["clip_fraction_low"] | per_token["clip_fraction_high"]
  ).any()


def test_only_logprobs_are_differentiated():
  logprobs, old, ref, rewards, mask = random_case(3)
  weights = losses.token_mean(mask)

  def loss(rewards, old, ref):
    return losses.grpo_loss(
      logprobs, rewards, weights, mask, old, ref, beta=0.5
    )[0]

  for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(rewards, old, ref):
    assert (gradient == 0).all()


# The KL term; what its gradient is stands in test_kl.py.


@pytest.mark.parametrize("kl", [losses.k1, losses.k2, losses.k3])
def test_kl_term_and_what_is_reported(kl):
  logprobs, old, ref, rewards, mask = random_case(4)
  weights = losses.token_mean(mask)
  args = (logprobs, rewards, weights, mask, old, ref)
  correction = kl is losses.k1
  plain, _ = losses.grpo_loss(*args)
  got, per_token = losses.grpo_loss(
    *args, kl=kl, beta=0.5, kl_correction=correction
  )
  term = kl(logprobs, ref) * (jnp.exp(logprobs - old) if correction else 1.0)
  np.testing.assert_allclose(
    got, plain + 0.5 * (weights * term).sum(), rtol=1e-5, atol=1e-6
  )
  d = np.asarray(ref - logprobs, np.float64)
  expected = np.where(mask, np.exp(d) - d - 1, 0)
  np.testing.assert_allclose(per_token["kl"], expected, rtol=1e-4, atol=1e-6)


def test_no_reference_is_needed_without_beta():
  logprobs, old, ref, rewards, mask = random_case(5)
  args = (logprobs, rewards, losses.token_mean(mask), mask, old)
  without, per_token = losses.grpo_loss(*args)
  aux, _ = losses.grpo_loss(*args, ref)
  assert without == aux
  assert (per_token["kl"] == 0).all()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"kl": losses.k1, "beta": 0.1},
      "kl_penalty.*kl_correction=True.*k2 or k3",
    ),
    ({"kl": losses.k2, "beta": 0.1, "kl_correction": True}, "k1 or k3"),
    ({"beta": 0.1, "ref_logprobs": None}, "needs ref_logprobs"),
    ({"beta": -0.1}, ">= 0"),
    ({"beta": float("nan")}, ">= 0"),
    ({"dual_clip": 1.0}, "must be > 1"),
    ({"clip_low": -0.1}, "must be >= 0"),
    ({"clip_high": -0.1}, "must be >= 0"),
  ],
)
def test_useless_settings_are_refused(settings, message):
  logprobs, old, ref, rewards, mask = random_case(6)
  settings = {"ref_logprobs": ref, **settings}
  with pytest.raises(ValueError, match=message):
    losses.grpo_loss(
      logprobs, rewards, losses.token_mean(mask), mask, old, **settings
    )


def test_shapes_that_only_broadcast_are_refused():
  # Without the run-time annotation checks, which only tests have.
  loss = getattr(losses.grpo_loss, "__wrapped__", losses.grpo_loss)
  logprobs, old, _, rewards, mask = random_case(7)
  weights = losses.token_mean(mask)
  for bad in (
    (logprobs, rewards[:, :1], weights, mask, old),
    (logprobs, rewards, weights[:1], mask, old),
    (logprobs, rewards, weights, mask, old[..., :1]),
  ):
    with pytest.raises(ValueError, match=r"advantages \[B, G\]"):
      loss(*bad)


# Numbers that must not get through.


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kl", [losses.k1, losses.k2, losses.k3])
@pytest.mark.parametrize("on_policy", [False, True])
def test_padding_may_hold_anything(ratio, kl, on_policy):
  logprobs, old, ref, rewards, mask = random_case(8)
  mask = mask.at[2, 1].set(False)
  weights = losses.sequence_mean(mask)

  @jax.jit
  def outcome(logprobs, old, ref, rewards):
    return jax.value_and_grad(
      lambda x: losses.grpo_loss(
        x,
        rewards,
        weights,
        mask,
        None if on_policy else old,
        ref,
        ratio=ratio,
        kl=kl,
        beta=0.1,
        kl_correction=kl is losses.k1,
      ),
      has_aux=True,
    )(logprobs)

  clean = outcome(logprobs, old, ref, rewards)
  rewards = rewards.at[2, 1].set(jnp.nan)
  for junk in itertools.permutations([jnp.nan, -jnp.inf, jnp.inf], 3):
    dirty = outcome(
      *(
        jnp.where(mask, x, j)
        for x, j in zip((logprobs, old, ref), junk, strict=True)
      ),
      rewards,
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
  assert (clean[1][~mask] == 0).all()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize(
  ("kl", "correction"),
  [
    (losses.k1, True),
    (losses.k2, False),
    (losses.k3, False),
    (losses.k3, True),
  ],
)
def test_extreme_tokens_stay_finite(ratio, kl, correction, on_policy):
  """A stored token that a policy now excludes, for every pair of policies."""
  ordinary, _, _, rewards, mask = random_case(9)

  @jax.jit
  def outcome(logprobs, old, ref):
    return jax.value_and_grad(
      lambda x: losses.grpo_loss(
        x,
        rewards,
        losses.token_mean(mask),
        mask,
        None if on_policy else old,
        ref,
        ratio=ratio,
        kl=kl,
        beta=0.1,
        kl_correction=correction,
      ),
      has_aux=True,
    )(logprobs)

  for extreme in (-1e30, -3e38, -jnp.inf):
    hit = ordinary.at[:, :, 0].set(extreme)
    for policies in itertools.product((ordinary, hit), repeat=3):
      for x in jax.tree.leaves(outcome(*policies)):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_jit_vmap_and_dtypes(ratio, dtype):
  cases = [random_case(seed)[:4] for seed in (10, 11)]
  mask = random_case(10)[4]
  weights = losses.token_mean(mask)

  def loss(logprobs, old, ref, rewards):
    return losses.grpo_loss(
      logprobs, rewards, weights, mask, old, ref, ratio=ratio, beta=0.1
    )

  cases = jax.tree.map(lambda x: x.astype(dtype), cases)
  separate = [loss(*case) for case in cases]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
  mapped = jax.jit(jax.vmap(loss))(*stacked)
  expected = jax.tree.map(lambda *x: jnp.stack(x), *separate)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    mapped,
    expected,
  )
  value, per_token = separate[0]
  assert value.shape == () and value.dtype == jnp.float32
  assert {k: (v.shape, v.dtype.name) for k, v in per_token.items()} == {
    "ratio": (mask.shape, "float32"),
    "kl": (mask.shape, "float32"),
    "clip_fraction_low": (mask.shape, "bool"),
    "clip_fraction_high": (mask.shape, "bool"),
  }
