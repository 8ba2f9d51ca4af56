"""The study of baselines: its errors against enumeration, and its program."""

import itertools

import numpy as np
import pytest

from grpojax.studies import baselines
from grpojax.studies.baselines import Pool

P = np.array([0.4, 0.3, 0.2, 0.1])
SCORES = (np.eye(4) - P) * [[1.0], [2.0], [1.0], [4.0]]
SCORES = SCORES - P @ SCORES  # their mean is 0
Z = np.array([1.0, 0, 0, 1])
UNSURE = np.array([0.5, 1.0, 2.0, 3.0])
LENGTHS = np.array([3.0, 1, 4, 1])
GRADIENT = (P * Z) @ SCORES
GRAM = SCORES @ SCORES.T


def pool_of(ids):
  return Pool(GRAM[np.ix_(ids, ids)], Z[ids], LENGTHS[ids], UNSURE[ids])


def test_gradient_sq_is_unbiased():
  """Over all pools of 3."""
  mean = 0.0
  for ids in itertools.product(range(4), repeat=3):
    pool = pool_of(list(ids))
    estimate = baselines.gradient_sq(pool, 0.3, np.arange(3))
    mean += np.prod(P[list(ids)]) * estimate
  assert mean == pytest.approx(GRADIENT @ GRADIENT, abs=1e-12)


def exact_errors(size):
  """Of leave-one-out with weights of each outcome, over all groups."""
  groups = np.array(list(itertools.product(range(4), repeat=size)))
  chance = P[groups].prod(-1)

  def error(weights):
    w, z = weights[groups], Z[groups]
    others = (w * z).sum(-1, keepdims=True) - w * z
    a = z - others / (w.sum(-1, keepdims=True) - w)
    estimates = np.einsum("ng,ngd->nd", a, SCORES[groups]) / size
    return chance @ ((estimates - GRADIENT) ** 2).sum(-1)

  return {
    "leave_one_out": error(np.ones(4)),
    "length_weighted": error(LENGTHS),
    "score_weighted, power 2": error(UNSURE**2),
    "true |s|^2 weights": error(np.diag(GRAM)),
  }


@pytest.mark.slow
def test_errors_are_those_of_all_groups():
  rng = np.random.default_rng(0)
  pools = [pool_of(rng.choice(4, 4000, p=P)) for _ in range(2)]
  measured = baselines.measure(pools, 0, 4, blocks=10, rounds=4)
  for name, exact in exact_errors(4).items():
    mean, without = measured[name]
    error = np.sqrt(np.var(without) * 9)
    assert error < 0.15 * exact
    assert mean == pytest.approx(exact, abs=4 * error), name
  # The best constant baseline has a closed form.
  score_sq = np.diag(GRAM)
  best = P @ (score_sq * Z) / (P @ score_sq)
  least = (P @ (score_sq * (Z - best) ** 2) - GRADIENT @ GRADIENT) / 4
  assert measured["best constant"][0] == pytest.approx(least, rel=0.15)
  others = baselines.norms_of_others(pools, 0)
  line = others.level + others.slope * Z
  right, wrong = ((P * keep) @ score_sq / (P @ keep) for keep in (Z, 1 - Z))
  assert float(line[0] / line[1]) == pytest.approx(right / wrong, rel=0.1)


@pytest.mark.slow
def test_a_whole_run_resumes(toy, toy_model, tmp_path, capsys):
  settings = {"base": toy_model, "instruct": toy_model, "num_prompts": 2}
  settings |= {"samples": 24, "group_sizes": "(2,4)", "blocks": 3, "shots": 1}
  settings |= {"max_new_tokens": 8}
  argv = [f"--config.{k}={v}" for k, v in settings.items()]
  argv.append(f"--run_dir={tmp_path / 'run'}")
  with toy.task():
    baselines.main(argv)
    first = (tmp_path / "run" / "results.csv").read_text()
    (tmp_path / "run" / "pools" / "instruct-1.npz").unlink()
    capsys.readouterr()
    baselines.main(argv)
  assert "instruct 2/2" in capsys.readouterr().out
  assert (tmp_path / "run" / "results.csv").read_text() == first
  assert len(first.splitlines()) == 1 + 3 * 2 * 10
  assert (tmp_path / "run" / "baselines.png").stat().st_size > 5000


def test_groups_are_divided_by_what_is_known():
  """Prompts whose scores differ in length: rates that are equal say nothing."""
  rng = np.random.default_rng(1)
  pools = []
  for length in (0.2, 1.0, 3.0, 6.0):
    pool = pool_of(rng.choice(4, 400, p=P))
    pools.append(pool._replace(gram=length**2 * pool.gram))
  found = baselines.allocation_errors(pools, 4, groups=8)
  lengths = np.array([0.2, 1, 3, 6])
  best = lengths.mean() ** 2 / (lengths**2).mean()
  assert best < found["error_of_other_half"] < 1.1 * best
  assert found["success_rates"] == pytest.approx(1, abs=0.08)
  assert found["success_rates_of_8"] > 0.95
