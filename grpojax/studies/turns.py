"""Credit of turns: a game learned from scratch, in one program.

    python -m grpojax.studies.turns [--config.key=value ...]

A decoder with random weights learns to guess numbers
(`environments.higher_lower`) by GRPO. Sampling, the game, credit and update are
one pure function, scanned over steps and vmapped over seeds. Every credit of
`core.turns` has the same seeds, so that differences are paired.

Writes curves.csv (a row for each credit, seed and step), results.csv,
summary.json and turns.png. An interrupted study goes on after the last credit
it finished.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Mapping

import jax
import numpy as np
import optax
from jaxtyping import Float
from ml_collections import ConfigDict

from grpojax.core.environment import returns
from grpojax.core.objective import Objective
from grpojax.core.random_keys import seed_key
from grpojax.core.step import init_state, make_grpo_step
from grpojax.core.turns import CREDITS
from grpojax.environments import higher_lower as game
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run

_CHUNKS = 10  # lines of progress of a credit

FLAGS = run.FLAGS
SETTINGS = run.settings(
  "turns",
  seed=run.SEED,
  seeds=setting(5, "runs of each credit", within="[2, inf)"),
  steps=setting(600, "training steps", within="[1, inf)"),
  numbers=setting(15, "numbers to be guessed from", within="[2, inf)"),
  max_turns=setting(4, "guesses", within="[1, inf)"),
  cost=setting(0.1, "cost of a wrong guess", within="[0, inf)"),
  group_size=setting(16, "games of each number a step", within="[2, inf)"),
  learning_rate=setting(3e-3, "learning rate (Adam)", within="(0, inf)"),
)


def make_advance(config: ConfigDict, credit: str):
  """Makes one program of all seeds.

  Returns:
    `advance(states, steps) -> (states, returns [seeds, steps])`, compiled once
    for a number of steps, and the states before the first.
  """
  lm = transformer(
    TransformerConfig(
      vocab_size=game.vocab_size(config.numbers),
      width=32,
      layers=2,
      heads=2,
      kv_heads=2,
      head_dim=16,
      mlp=64,
    )
  )
  tx = optax.adam(config.learning_rate)
  step = make_grpo_step(
    lm,
    tx,
    returns,
    group_size=config.group_size,
    max_new_tokens=2 * config.max_turns - 1,
    eos_ids=tuple(range(config.numbers)),
    objective=Objective(weighting="sequence_sum"),
    environment=game.higher_lower(
      config.numbers, config.max_turns, config.cost
    ),
    credit=credit,
  )
  prompts = game.prompts(config.numbers)

  def train(state, steps):
    def one(state, _):
      state, metrics = step(state, prompts)
      return state, metrics["reward_mean"]

    return jax.lax.scan(one, state, length=steps)

  def advance(states, steps):
    return jax.vmap(lambda state: train(state, steps))(states)

  keys = jax.random.split(seed_key(config.seed), (config.seeds, 2))
  first = jax.vmap(lambda key: init_state(lm.init(key[0]), tx, key[1]))(keys)
  return jax.jit(advance, static_argnums=1, donate_argnums=0), first


def train_all(
  config: ConfigDict, credit: str
) -> Float[np.ndarray, "seeds steps"]:
  """Trains all seeds, with progress; mean returns along training."""
  advance, states = make_advance(config, credit)
  began, parts, step = time.perf_counter(), [], 0
  while step < config.steps:
    chunk = min(-(-config.steps // _CHUNKS), config.steps - step)
    states, of_chunk = advance(states, chunk)
    parts.append(np.asarray(of_chunk))
    step += chunk
    print(
      f"{credit}: step {step}/{config.steps}, mean return "
      f"{parts[-1][:, -1].mean():.3f}, "
      f"{records.duration(time.perf_counter() - began)}",
      flush=True,
    )
  return np.concatenate(parts, axis=1)


Curves = Mapping[str, Float[np.ndarray, "seeds steps"]]


def table(curves: Curves) -> list[dict[str, float | str]]:
  """A row for each credit: returns over training and at its end.

  `gain` is the difference from the credit of trajectories with the same seed,
  over the whole of training. Intervals are 95%, over seeds.
  """
  rows, base = [], curves["trajectory"].mean(1)
  for credit, curve in curves.items():
    row, mean = {"credit": credit}, curve.mean(1)
    last = curve[:, -max(curve.shape[1] // 10, 1) :].mean(1)
    values = {"return": mean, "at_end": last, "gain": mean - base}
    for name, of_seeds in values.items():
      row |= run.with_interval(name, of_seeds)
    rows.append(row)
  return rows


def draw(config: ConfigDict, curves: Curves, path: pathlib.Path) -> None:
  """Draws mean returns along training, and the best that there is."""
  best = game.best_return(config.numbers, config.max_turns, config.cost)
  with run.picture(path, 1, 1, width=6.0) as ((axes,),):
    for credit, curve in curves.items():
      steps = np.arange(1, curve.shape[1] + 1)
      middle, low, high = np.array([mean_interval(x) for x in curve.T]).T
      axes.plot(steps, middle, label=credit, lw=1.5)
      axes.fill_between(steps, low, high, alpha=0.15, lw=0)
    axes.axhline(best, color="black", ls="--", lw=1, label="halving")
    axes.set(xlabel="step", ylabel="mean return")
    axes.grid(alpha=0.3)
    axes.legend()


def write(config: ConfigDict, directory: pathlib.Path, curves: Curves) -> None:
  """Writes tables, summary and picture, and prints the result."""
  rows = table(curves)
  points = [
    {"credit": credit, "seed": seed, "step": step + 1, "return": float(value)}
    for credit, curve in curves.items()
    for (seed, step), value in np.ndenumerate(curve)
  ]
  run.write_tables(directory, curves=points, results=rows)
  best = game.best_return(config.numbers, config.max_turns, config.cost)
  records.write_json(
    directory / "summary.json", {"best": best, "credits": rows}
  )
  draw(config, curves, directory / "turns.png")
  print(f"a player who halves what is left has {best:.3f} on average")
  for row in rows:
    line = (
      "{credit}: mean return {return:.3f} [{return_low:.3f}, {return_high:.3f}]"
      ", at the end {at_end:.3f} [{at_end_low:.3f}, {at_end_high:.3f}]"
    )
    if row["credit"] != "trajectory":
      line += ", more by {gain:.3f} [{gain_low:.3f}, {gain_high:.3f}]"
    print(line.format(**row))
  print(f"written to {directory}/")


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after the program's name."""
  nothing_else_to_check = lambda config: []
  opened = run.study(argv, SETTINGS, nothing_else_to_check, __doc__)
  with opened as (config, directory):
    curves = {
      credit: run.load_or_make(
        directory / f"{credit}.npy",
        functools.partial(train_all, config, credit),
      )
      for credit in CREDITS
    }
    write(config, directory, curves)


if __name__ == "__main__":
  main(sys.argv[1:])
