"""The study of turns: the game, and a small whole run."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.environments import higher_lower as game
from grpojax.studies import turns


def test_the_game_answers_and_ends():
  environment = game.higher_lower(8, max_turns=3, cost=0.2)
  key = jax.random.key(0)
  secret = environment.reset(jnp.int32(5), key)
  for guess, answer, reward in ((2, 8, -0.2), (6, 9, -0.2), (5, None, 1.0)):
    ids = jnp.array([9, guess, 0])  # a token before the number; padding
    secret, seen = environment.step(secret, ids, 2, key)
    assert float(seen.reward) == pytest.approx(reward)
    assert bool(seen.done) == (answer is None)
    assert answer is None or seen.ids.tolist() == [answer]


@pytest.mark.parametrize(
  ("numbers", "max_turns"), [(15, 4), (15, 2), (3, 5), (1, 1), (6, 3)]
)
def test_the_best_return_is_that_of_the_best_player(numbers, max_turns):
  """By going through all first guesses, and so on."""

  def best(n, turns):  # sum over n numbers that are left
    if not n or not turns:
      return 0.0
    return max(
      1 + sum(-0.1 * side + best(side, turns - 1) for side in (i, n - 1 - i))
      for i in range(n)
    )

  expected = best(numbers, max_turns) / numbers
  assert game.best_return(numbers, max_turns) == pytest.approx(expected)


@pytest.mark.long
def test_a_small_study(tmp_path, capsys):
  arguments = [
    f"--run_dir={tmp_path}/turns",
    "--config.steps=3",
    "--config.seeds=2",
    "--config.numbers=3",
    "--config.max_turns=2",
    "--config.group_size=4",
    "--config.learning_rate=0.01",
  ]
  turns.main(arguments)
  printed = capsys.readouterr().out
  assert "turn: step 3/3, mean return" in printed
  with open(tmp_path / "turns" / "results.csv") as file:
    rows = {row["credit"]: row for row in csv.DictReader(file)}
  assert [*rows] == ["trajectory", "turn", "turn_reached"]
  with open(tmp_path / "turns" / "curves.csv") as file:
    curves = list(csv.DictReader(file))
  assert len(curves) == 3 * 2 * 3
  of = lambda credit: [
    float(r["return"]) for r in curves if r["credit"] == credit
  ]
  mean = np.mean(of("turn"))
  assert float(rows["turn"]["return"]) == pytest.approx(mean)
  gain = mean - np.mean(of("trajectory"))
  assert float(rows["turn"]["gain"]) == pytest.approx(gain, abs=1e-6)
  # The same seeds begin alike, and differ from the first update on.
  first = of("trajectory")[0::3], of("turn")[0::3]
  assert first[0] == first[1] and of("trajectory") != of("turn")
  summary = json.loads((tmp_path / "turns" / "summary.json").read_text())
  assert summary["best"] == pytest.approx(game.best_return(3, 2))
  assert (tmp_path / "turns" / "turns.png").stat().st_size > 10_000
  turns.main(arguments)  # trains nothing again
  assert "step" not in capsys.readouterr().out
