"""Diagnoses against enumeration, per-sample gradients and simulation."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from populations import population
from small_models import config_with, random_params

from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import completion_mask
from grpojax.core.types import Rollout
from grpojax.models.transformer import last_layers, transformer
from grpojax.statistics import diagnostics, group_size, projections
from grpojax.statistics import u_statistics as u

# Prompts, completions per prompt, group size.
X = 2
M = 3
G = 3
EOS = 0


def exact(*population):
  args = [*map(jnp.asarray, population)]
  return group_size.components(u.moments(*args), u.policy_gradient(*args))


def expectation(p, s, z):
  """Averages the components of `diagnose` over all batches of three prompts.

  Two directions come from a basis of the scores' span with E[v v^T] = I.
  """
  basis = np.linalg.svd(s.reshape(-1, s.shape[-1]), full_matrices=False)[2]
  basis = basis[: X * (M - 1)]  # the scores of a prompt add up to 0
  a = np.einsum("kd,xmd->kxm", basis, s) * np.sqrt(len(basis))
  group, often = multisets(M, G)
  chance = (often * p[:, group].prod(-1) / X).reshape(-1)
  a = a[:, :, group].reshape(len(basis), -1, G)
  rewards = z[:, group]
  rewards = jnp.asarray(rewards.reshape(-1, G))
  batches, often = multisets(len(chance), 3)
  batch_chance = often * chance[batches].prod(1)
  directions, direction_often = multisets(len(basis), 2)
  diagnose = jax.jit(jax.vmap(diagnostics.diagnose))
  total = 0.0
  for pair, times in zip(directions, direction_often, strict=True):
    projections = jnp.asarray(a[pair][:, batches].swapaxes(0, 1))
    result = diagnose(projections, rewards[batches]).components
    total += times * batch_chance @ np.stack(result, -1)
  return total / len(basis) ** 2


def multisets(n, size):
  """Lists all multisets of 0 .. n - 1, and their numbers of sequences."""
  result = list(itertools.combinations_with_replacement(range(n), size))
  often = [
    math.factorial(size) / math.prod(math.factorial(x.count(i)) for i in set(x))
    for x in result
  ]
  return np.array(result), np.array(often)


@pytest.mark.slow
def test_components_are_unbiased(float64):
  p, s, z = population(2, X, M, 2)
  expected = np.stack(exact(p, s, z + 1))
  assert_allclose(expectation(p, s, z + 1), expected, atol=1e-10)


@pytest.fixture(scope="module")
def tiny_decoder():
  lm = transformer(config_with(vocab_size=3, layers=3))
  return lm, random_params(lm)


@functools.partial(jax.jit, static_argnums=0)
def logprobs(lm, params, rollout):
  prompts = rollout.prompt_ids, rollout.prompt_mask
  each, _ = token_logprobs(lm, params, *prompts, rollout.completion_ids)
  return jnp.where(rollout.completion_mask, each, 0).sum(-1)


def project(lm, params, rollout, **options):
  """Returns a rollout's projected scores, and the directions [V, d]."""
  key = jax.random.key(3)
  run = functools.partial(diagnostics.score_projections, lm, **options)
  result = jax.jit(lambda p, r: run(p, r, key))(params, rollout)
  split = options.get("split", lambda params: (params, None))
  return result, directions(key, split(params)[0], options["tangents"])


@pytest.fixture(scope="module")
def sampled():
  """Four prompts with four completions each, of up to three tokens."""
  ids = jnp.array([[1, 0, 0], [2, 2, 1], [0, 0, 0], [1, 1, 0]])
  ids = jnp.stack([ids, ids, ids[::-1], ids[::-1]])
  return Rollout(
    prompt_ids=jnp.array([[1, 2, 0], [2, 0, 0]] * 2),
    prompt_mask=jnp.array([[True, True, False], [True, False, False]] * 2),
    completion_ids=ids,
    completion_mask=completion_mask(ids, (EOS,)),
    logprobs=jnp.zeros(ids.shape),
    finished=jnp.ones(ids.shape[:2], bool),
  )


def flat(tree, axes):
  """Concatenates the leaves after flattening all but the first `axes` axes."""
  leaves = [x.reshape(*x.shape[:axes], -1) for x in jax.tree.leaves(tree)]
  return jnp.concatenate(leaves, -1)


@functools.partial(jax.jit, static_argnums=2)
def directions(key, moving, count):
  trees = [
    projections.rademacher_like(k, moving) for k in jax.random.split(key, count)
  ]
  return flat(jax.tree.map(lambda *x: jnp.stack(x), *trees), 1)


def all_move(params):
  return params, lambda moving: moving


def norm_moves(params):
  norm = {"final_norm": params["final_norm"]}
  return norm, lambda moving: params | moving


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    {"split": all_move, "micro_batches": 2, "chunk_size": 2},
    {"split": norm_moves},
  ],
)
def test_projections_equal_per_sample_gradients(tiny_decoder, sampled, options):
  lm, params = tiny_decoder
  result, v = project(lm, params, sampled, tangents=3, **options)
  assert set(np.unique(v)) == {-1, 1}
  moving, merge = options["split"](params)
  function = lambda moving: logprobs(lm, merge(moving), sampled)
  gradients = jax.jit(jax.jacrev(function))(moving)
  expected = jnp.einsum("vd,bgd->vbg", v, flat(gradients, 2))
  assert_allclose(result, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow  # compiles
def test_model_with_experts_is_diagnosed(sampled):
  """Functions of experts cannot be vmapped; compares with single gradients."""
  lm = transformer(config_with(layers=1, experts=3, experts_per_token=2))
  params = random_params(lm)
  options = {"tangents": 2, "vectorized": False}
  result, v = project(lm, params, sampled, **options)
  logprob = lambda params, b, i: logprobs(lm, params, sampled)[b, i]
  gradient = jax.jit(jax.grad(logprob))
  for b, i in ((0, 1), (2, 3), (3, 0)):
    expected = v @ flat([gradient(params, b, i)], 0)
    assert_allclose(result[:, b, i], expected, rtol=1e-3, atol=1e-3)


def simulate(rng, prompts, group, tangents, batches):
  """Draws batches of a softmax policy: 6 prompts, 5 completions, 40 parameters.

  Returns projections [batches, V, B, G], rewards, and the exact components.
  """
  x = 6
  m = 5
  d = 40
  logits = rng.normal(size=(x, m))
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  common = rng.normal(size=(m, d))  # correlates the prompts
  s = common + 0.7 * rng.normal(size=(x, m, d))
  s -= np.einsum("xm,xmd->xd", p, s)[:, None]
  z = 1.0 * (np.arange(m) < 2) * np.ones((x, 1))
  which = rng.integers(x, size=(batches, prompts))
  uniform = rng.random(size=(batches, prompts, group, 1))
  drawn = (uniform > p.cumsum(-1)[which][:, :, None]).sum(-1).clip(0, m - 1)
  signs = rng.choice([-1.0, 1.0], size=(batches, tangents, d))
  a = np.einsum("nvd,xmd->nvxm", signs, s)
  rows = np.arange(batches)[:, None, None, None]
  axis = np.arange(tangents)[None, :, None, None]
  a = a[rows, axis, which[:, None, :, None], drawn[:, None]]
  return a, z[which[..., None], drawn], exact(p, s, z)


@pytest.mark.slow
def test_standard_errors_and_interval_cover():
  rng = np.random.default_rng(0)
  batches = 1500
  a, z, truth = simulate(rng, 24, 8, 4, batches)
  diagnose = jax.jit(jax.vmap(diagnostics.diagnose))
  result = diagnose(jnp.asarray(a), jnp.asarray(z))
  for name in ("c1", "c2", "c3", "c2_vanilla", "gradient_sq"):
    values = np.asarray(getattr(result.components, name), np.float64)
    expected = float(getattr(truth, name))
    error = values.std() / np.sqrt(batches)
    assert abs(values.mean() - expected) < 4 * error, name
    # Compares with the real error; the estimate may count a little twice.
    squares = np.asarray(getattr(result.standard_errors, name)) ** 2
    stated = np.sqrt(np.mean(squares))
    assert 0.95 < stated / values.std() < 1.25, name
  best = 1 + np.sqrt(truth.c3 / truth.c1)
  covered = np.mean((result.low <= best) & (best <= result.high))
  # 95% -+ four standard errors of this simulation, plus the safe side.
  assert 0.93 < covered < 0.995
  assert np.mean(np.isfinite(result.high)) > 0.2  # the interval is not trivial


@pytest.mark.slow
def test_diagnosis_combines_its_components():
  a, z, _ = simulate(np.random.default_rng(1), 12, 4, 3, 1)
  result = jax.jit(diagnostics.diagnose, static_argnums=2)(a[0], z[0], 48)
  c = result.components
  error = group_size.mse_curve(c, 4, 48 * 4)
  expected = {
    "c1": c.c1,
    "c3_se": result.standard_errors.c3,
    "gradient_mse": error.leave_one_out,
    "gradient_mse_oracle": error.oracle,
    "gradient_mse_vanilla": error.vanilla,
    "gradient_snr": max(c.gradient_sq, 0) / error.leave_one_out,
    "optimal_group_size": result.optimal_group_size,
  }
  row = diagnostics.metrics(result)
  for name, value in expected.items():
    assert_allclose(row[name], value, rtol=1e-4, err_msg=name)
  assert result.low <= result.optimal_group_size <= result.high


def test_missing_or_equal_rewards():
  """A missing reward makes all nan; equal rewards leave G* unknown."""
  a = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 4)), jnp.float32)
  diagnose = jax.jit(diagnostics.diagnose)
  result = diagnose(a, jnp.ones((5, 4)).at[1, 2].set(np.inf))
  assert np.isnan([*result.components, *result.standard_errors]).all()
  result = diagnose(a, jnp.ones((5, 4)))
  assert result.components.c3 == 0 and result.components.c2 == 0
  assert result.low == 1 and result.high == jnp.inf
  assert result.components.c2_vanilla > 0
  assert not any(np.isnan(x) for x in jax.tree.leaves(result))


@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 2, 4), (2, 4, 2)])
def test_too_few_tangents_prompts_or_samples_are_refused(shape):
  with pytest.raises(ValueError, match="at least 2 tangents, 3 prompts"):
    diagnostics.diagnose(jnp.ones(shape), jnp.ones(shape[1:]))


@pytest.mark.slow
def test_invalid_parts_and_layers_are_refused(tiny_decoder, sampled):
  with pytest.raises(ValueError, match="micro_batches=3 must divide 4"):
    project(*tiny_decoder, sampled, tangents=2, micro_batches=3)
  for count in (0, 4):
    with pytest.raises(ValueError, match="use 1 to 3 layers"):
      last_layers(tiny_decoder[1], count)
