"""How far from the optimum a GRPO run ends: a whole distribution, and theory.

    python -m grpojax.studies.suboptimality [--config.key=value ...]

Theorem 8 and Corollaries 9 and 10 of arXiv 2603.01162 on a bandit of which
everything is known (`studies.tabular`). Thousands of complete GRPO runs, with
step sizes eta / n, are vmapped over seeds in one program for each estimator and
group size G, at N = B G samples a step. n times their suboptimality gap is
compared with the weighted sum of chi-squares that the theory predicts from the
curvature and the gradient noise at the optimum, without a fitted constant.

Writes results.csv (a row for each estimator, G and n), quantiles.csv,
distances.csv, summary.json and suboptimality.png. An interrupted study goes on
after the last estimator it finished.
"""

import itertools
import pathlib
import sys
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from grpojax.core.grpo_step import init_state
from grpojax.core.types import Prompts, TrainState
from grpojax.runtime import records, settings
from grpojax.runtime.config import config_error
from grpojax.studies import asymptotics, run, suboptimality_report, tabular

ESTIMATORS = ("vanilla", "leave_one_out", "oracle")
_CHUNK = 500  # steps between two lines of progress


FLAGS = run.FLAGS
SETTINGS = settings.section(
  "the study",
  name=settings.setting(
    "suboptimality", "name of the study; its directory is runs/NAME"
  ),
  seed=settings.setting(0, "seed of all random numbers", within="[0, 2**32)"),
  runs=settings.setting(
    3000, "independent GRPO runs for each estimator and G", within="[2, inf)"
  ),
  steps=settings.setting((100, 500, 2000), "n, at which the gap is measured"),
  num_samples=settings.setting(16, "N = B G completions a step"),
  group_sizes=settings.setting((2, 4, 8, 16), "group sizes G"),
  gain=settings.setting(
    1.0,
    "eta times the smallest curvature; the 1/n rate needs more than 1/2",
    within="(0.5, inf)",
  ),
  offset=settings.setting(
    20, "step sizes are eta / (n + offset)", within="[0, inf)"
  ),
  problem=settings.section(
    "the bandit, see tabular.make_problem",
    seed=settings.setting(0, "seed of its random numbers"),
    prompts=settings.setting(8, "prompts, equally likely", within="[1, inf)"),
    vocab=settings.setting(4, "completions of a prompt", within="[2, inf)"),
    dims=settings.setting(3, "parameters of the policy", within="[2, inf)"),
    spread=settings.setting(
      0.5, "how much the prompts differ", within="(0, inf)"
    ),
    beta=settings.setting(
      0.5,
      "coefficient of the KL divergence from the reference",
      within="(0, inf)",
    ),
  ),
)
"""The embedded study."""


def default_config() -> ConfigDict:
  """The embedded study as a config."""
  return settings.to_config(SETTINGS)


def problems(config: ConfigDict) -> list[str]:
  """What is wrong with values that are in their ranges, a line each."""
  wrong = []

  def need(holds: bool, name: str, todo: str):
    if not holds:
      wrong.append(config_error(name, config[name], todo))

  def increasing(values, least):
    whole = values and all(type(x) is int for x in values)
    return whole and least <= values[0] and sorted(set(values)) == list(values)

  todo = "must be increasing whole numbers, 1 or more"
  need(increasing(config.steps, 1), "steps", todo)
  todo = "must be increasing whole numbers, 2 or more"
  need(increasing(config.group_sizes, 2), "group_sizes", todo)
  if not wrong:
    odd_sizes = [g for g in config.group_sizes if config.num_samples % g]
    todo = (
      f"must be a positive multiple of every group size, not of {odd_sizes}"
    )
    need(config.num_samples >= 1 and not odd_sizes, "num_samples", todo)
  if not wrong:
    try:
      setting(config)
    except ValueError as error:
      seed = config.problem.seed
      wrong.append(config_error("problem.seed", seed, f"{error}"))
  return wrong


class Setting(NamedTuple):
  """What theory needs to know, from the config alone.

  Attributes:
    problem: the bandit.
    optimum: theta*.
    curvature: H = -grad^2 J(theta*).
    eta: numerator of the step sizes.
    best: J*.
  """

  problem: tabular.Problem
  optimum: Float[np.ndarray, "d"]
  curvature: Float[np.ndarray, "d d"]
  eta: float
  best: float


def setting(config: ConfigDict) -> Setting:
  """The bandit and its optimum; ValueError where that is degenerate."""
  problem = tabular.make_problem(**config.problem)
  optimum = tabular.optimum(problem)
  curvature = -tabular.derivatives(problem, optimum)[1]
  eta = float(config.gain / np.linalg.eigvalsh(curvature)[0])
  best = float(tabular.objective(problem, optimum))
  return Setting(problem, optimum, curvature, eta, best)


def make_advance(
  config: ConfigDict, known: Setting, estimator: str, group_size: int
) -> tuple[Callable, tuple[TrainState, Array]]:
  """All runs of one estimator as one program.

  Returns:
    `advance(runs, steps) -> runs`, compiled once for any number of steps, and
    the runs before their first step: training states and the keys that their
    prompts are drawn with, each with a leading axis of runs.
  """
  tx = optax.sgd(lambda count: known.eta / (count + 1 + config.offset))
  step = tabular.make_step(known.problem, estimator, group_size, tx)
  reference = tabular.policy(known.problem).init(jax.random.key(0))
  shape = (config.num_samples // group_size, 1)

  def one_step(state, key):
    key = jax.random.fold_in(key, state.step)
    ids = jax.random.randint(key, shape, 0, config.problem.prompts)
    prompts = Prompts(ids, jnp.ones(shape, bool))
    return step(state, prompts, reference)[0]

  def advance(runs, steps):
    states, keys = runs
    states = jax.lax.fori_loop(
      0, steps, lambda _, states: jax.vmap(one_step)(states, keys), states
    )
    return states, keys

  # A name of its own for each, so that no two estimators share samples.
  stream = zlib.crc32(f"{estimator} {group_size}".encode()) % 2**31
  key = jax.random.fold_in(jax.random.key(config.seed), stream)
  keys = jax.random.split(key, (2, config.runs))
  states = jax.vmap(lambda key: init_state(reference, tx, key))(keys[0])
  return jax.jit(advance, donate_argnums=0), (states, keys[1])


def simulate(
  config: ConfigDict, known: Setting, estimator: str, group_size: int
) -> Float[np.ndarray, "S R d"]:
  """Parameters of all runs after each of config.steps, with progress."""
  advance, runs = make_advance(config, known, estimator, group_size)
  start, done, kept = time.perf_counter(), 0, []
  for n in config.steps:
    while done < n:
      chunk = min(_CHUNK, n - done)
      runs = advance(runs, chunk)
      done += chunk
      params = np.asarray(runs[0].params, float)
      seconds = int(time.perf_counter() - start)
      print(
        f"{estimator} G={group_size}: step {done}/{config.steps[-1]}, "
        f"{records.duration(seconds)}",
        flush=True,
      )
    kept.append(params)
  return np.stack(kept)


def load_or_simulate(
  config: ConfigDict,
  known: Setting,
  directory: pathlib.Path,
  estimator: str,
  group_size: int,
) -> Float[np.ndarray, "S R"]:
  """Scaled gaps n (J* - J(theta_n)) of all runs, whose parameters are kept."""
  path = directory / f"{estimator}_{group_size}.npy"
  if path.exists():
    params = np.load(path)
  else:
    params = simulate(config, known, estimator, group_size)
    with records.replacing(path) as temporary, open(temporary, "wb") as file:
      np.save(file, params)
  gap = known.best - tabular.objective(known.problem, params)
  return gap * np.array(config.steps)[:, None]


def outcome(
  config: ConfigDict,
  known: Setting,
  estimator: str,
  group_size: int,
  gaps: Float[np.ndarray, "S R"],
) -> suboptimality_report.Outcome:
  """The runs beside what theory says of them."""
  noise = getattr(
    tabular.gradient_noise(
      known.problem, known.optimum, group_size, config.num_samples
    ),
    estimator,
  )
  h, eta = known.curvature, known.eta
  covariance = asymptotics.limit_covariance(h, noise, eta)
  weights = asymptotics.chi_square_weights(h, covariance)
  limit = asymptotics.chi_square_quantiles(weights)
  linear = asymptotics.linear_gap(
    h, noise, -known.optimum, eta, config.offset, config.steps
  )
  return suboptimality_report.Outcome(
    gaps,
    limit,
    float(weights.sum()),
    linear * np.array(config.steps),
    asymptotics.null_bands(limit, config.runs),
  )


def best_group_size(config: ConfigDict, known: Setting) -> float:
  """G that minimises the mean of the limit at N samples a step.

  The mean is linear in the noise, so it has the form a1 G + a2 + a3 / (G - 1)
  of Proposition 3 with weights of its own, and its minimum at
  1 + sqrt(a3 / a1) whatever N is.
  """

  def mean(estimator, g):
    noise = tabular.gradient_noise(known.problem, known.optimum, g, 1)
    s = asymptotics.limit_covariance(
      known.curvature, getattr(noise, estimator), known.eta
    )
    return asymptotics.chi_square_weights(known.curvature, s).sum()

  a1 = max(mean("oracle", 3) - mean("oracle", 2), 0.0)
  a3 = mean("leave_one_out", 2) - mean("oracle", 2)
  return float(1 + np.sqrt(a3 / a1)) if a1 else float("inf")


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, or what is left of it."""
  config, directory = run.open_study(
    argv,
    "python -m grpojax.studies.suboptimality",
    SETTINGS,
    problems,
    __doc__,
  )
  start, known, outcomes = time.perf_counter(), setting(config), {}
  with run.resumable():
    for label in itertools.product(ESTIMATORS, config.group_sizes):
      gaps = load_or_simulate(config, known, directory, *label)
      outcomes[label] = outcome(config, known, *label, gaps)
  rows = suboptimality_report.tables(config.steps, outcomes)
  for name, table in rows.items():
    run.write_csv(directory / f"{name}.csv", table)
  best = best_group_size(config, known)
  records.write_json(
    directory / "summary.json",
    {
      "theta_star": list(known.optimum),
      "curvature": list(np.linalg.eigvalsh(known.curvature)),
      "eta": known.eta,
      "best_group_size": best,
      "results": [r for r in rows["results"] if r["n"] == config.steps[-1]],
    },
  )
  suboptimality_report.draw(
    directory / "suboptimality.png", config.steps, outcomes
  )
  print(suboptimality_report.text(rows, best))
  seconds = int(time.perf_counter() - start)
  print(f"{directory}, {records.duration(seconds)}")


if __name__ == "__main__":
  main(sys.argv[1:])
