"""Options: ranges, choices, and errors that list all invalid values."""

import functools
import math

import pytest

from grpojax.core.losses import kl as kl_lib
from grpojax.core.losses import surrogates
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.objective import Objective, advantage_fn, loss_fn
from grpojax.core.options import (
  Option,
  declared_options,
  in_interval,
  interval_text,
  refusal,
)
from grpojax.core.update import UpdateOptions

INF = math.inf
NAN = math.nan


@pytest.mark.parametrize(
  "within, inside, outside, words",
  [
    ("[1, inf)", (1, 2.5, 1e300), (0, 0.999, INF, NAN), "1 or more"),
    ("(0, inf)", (1e-300,), (0, -1, INF, NAN), "more than 0"),
    ("(0, inf]", (1e-300, INF), (0, -1, NAN), "more than 0"),
    ("[0, 1)", (0, 0.5), (1, -0.1, NAN), "in [0, 1)"),
    ("(0, 1]", (1, 0.5), (0, 1.1, -INF), "in (0, 1]"),
    ("[0, 2**9)", (0, 2**9 - 1), (2**9, -1), "0 or more, and less than 2**9"),
  ],
)
def test_intervals(within, inside, outside, words):
  assert all(in_interval(within, x) for x in inside)
  assert not any(in_interval(within, x) for x in outside)
  assert interval_text(within) == words
  for wrong in (within[1:], within[:-1], within.replace(",", ""), ""):
    with pytest.raises(ValueError):
      in_interval(wrong, 0.5)


SIZE = Option(8, "of it", within="[1, inf)", words=("auto",))
RATE = Option(1.0, "rate", within="(0, inf)")
KIND = Option("a", "which", {"a": max, "b": min})
OBJECTIVE, UPDATE = map(declared_options, (Objective, UpdateOptions))


@pytest.mark.parametrize(
  "declared, value, text",
  [
    (SIZE, 0, "must be 1 or more, or auto (of it)"),
    (Option(0.5, "how much", within="[0, 1)"), 1.0, "must be in [0, 1)"),
    (RATE, INF, "more than 0, and finite"),
    (RATE, NAN, "more than 0, and finite"),
    (KIND, "c", "use one of a, b (which)"),
    (Option(("a",), "which", ("a", "b")), ("b", "c"), "use one of a, b"),
    (
      Option("constant", "course", ("constant", "cosine")),
      "cosin",
      "did you mean cosine? use one of constant, cosine (course)",
    ),
    # Of another type, which run-time type checks refuse in tests only.
    (OBJECTIVE["beta"], "0.1", "must be a number"),
    (OBJECTIVE["clip_high"], max, "must be a number"),
    (OBJECTIVE["clip_high"], -(10**400), "must be 0 or more"),
    (OBJECTIVE["subset_size"], 2.5, "must be a whole number"),
    (OBJECTIVE["advantage"], ["grpo"], "did you mean grpo? use one of"),
    (UPDATE["epochs"], True, "must be a whole number"),
  ],
)
def test_a_wrong_value_is_refused_with_the_help_text(declared, value, text):
  assert text in refusal(declared, value)
  assert ("did you mean" in refusal(declared, value)) == ("mean" in text)
  assert refusal(declared, declared.default) is None
  # Words instead of numbers, and functions instead of names.
  assert refusal(SIZE, "auto") is refusal(KIND, len) is None


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "exact"])
def test_kl_estimators_are_chosen_by_placement(placement, kl):
  objective = Objective(beta=0.1, kl=kl, kl_placement=placement)
  assert objective.kl_in_reward == (0.1 if placement == "reward" else 0)
  if kl in PLACEMENTS[placement]:
    bound = loss_fn(objective).keywords
    assert ("beta" in bound) == (placement != "reward")
    assert bound.get("kl") is (
      vars(kl_lib).get(kl) if "beta" in bound else None
    )
    assert bound.get("kl_correction", False) == (placement == "ratio")
  else:
    with pytest.raises(ValueError, match=f"kl = '{kl}': with kl_placement"):
      loss_fn(objective)


def test_fields_are_bound_to_parameters_of_their_names():
  bound = loss_fn(Objective(surrogate="sapo", ratio="sequence_ratio")).keywords
  assert bound["ratio"] is surrogates.sequence_ratio
  assert bound["surrogate"].func is surrogates.sapo

  def advantage(rewards, k, power):
    return k, power

  options = {"subset_size": 3, "score_power": 1.5}
  assert advantage_fn(Objective(advantage, **options))(None) == (3, 1.5)
  bound_before = functools.partial(advantage, k=7)
  assert advantage_fn(Objective(bound_before, **options))(None) == (7, 1.5)

  def surrogate(ratios, logprobs, advantages, *, clip_low, cispo_max):
    return clip_low, cispo_max

  objective = Objective(surrogate=surrogate, clip_low=0.1, cispo_max=4.0)
  settings = loss_fn(objective).keywords["surrogate"](None, None, None)
  assert settings == (0.1, 4.0)
