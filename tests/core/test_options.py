"""Options: ranges, choices, and errors that say all that is wrong at once."""

import dataclasses
import functools
import math

import pytest

from grpojax.core.decoding import Decoding
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.losses import kl as kl_lib
from grpojax.core.losses import surrogates
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.objective import (
  Objective,
  advantage_fn,
  correction_fn,
  loss_fn,
)
from grpojax.core.options import (
  Option,
  declared_options,
  frozen_options,
  in_interval,
  interval_text,
  option,
  refusal,
)
from grpojax.core.update import UpdateOptions

INF, NAN = math.inf, math.nan


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
  ],
)
def test_a_wrong_value_is_refused_with_the_description(declared, value, text):
  assert text in refusal(declared, value)
  assert ("did you mean" in refusal(declared, value)) == ("mean" in text)
  assert refusal(declared, declared.default) is None
  # A word may stand in the place of a number, a function in that of a name.
  assert refusal(SIZE, "auto") is refusal(KIND, len) is None


@pytest.mark.parametrize(
  "kind, name, value, message",
  [
    (Objective, "beta", "0.1", "must be a number"),
    (Objective, "clip_high", max, "must be a number"),
    (Objective, "clip_high", -(10**400), "must be 0 or more"),
    (Objective, "subset_size", 2.5, "must be a whole number"),
    (Objective, "advantage", ["grpo"], "use one of"),
    (UpdateOptions, "epochs", True, "must be a whole number"),
  ],
)
def test_a_value_of_another_type_is_refused(kind, name, value, message):
  """By users without run-time type checks, which these tests have on."""
  assert message in refusal(declared_options(kind)[name], value)


def test_a_declaration_is_a_field():
  @frozen_options
  class Two:
    size: int = option(3, "of it", within="[1, inf)")
    plain: int = 4

  expected = {"size": Option(3, "of it", within="[1, inf)")}
  assert declared_options(Two) == expected
  with pytest.raises(ValueError, match=r"size = 0: must be 1 or more \(of it"):
    dataclasses.replace(Two(), size=0, plain=-1)


@pytest.mark.parametrize(
  "kind, name, value, text",
  [
    (Sampling, "temperature", -1.0, "must be "),
    (Decoding, "stages", 0, "must be 1 or more"),
    (UpdateOptions, "epochs", 0, "must be "),
    (Objective, "dual_clip", 0.5, "must be more than 1, or 0"),
    (Objective, "correction_high", 0.5, "must be 1 or more"),
    (Objective, "advantage", "oracle", "needs the true value"),
  ],
)
def test_options_refuse_values_when_they_are_made(kind, name, value, text):
  with pytest.raises(ValueError) as error:
    kind(**{name: value})
  assert str(error.value).startswith(f"{name} = {value!r}: {text}")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "exact"])
def test_a_kl_term_has_an_estimator_of_its_placement(placement, kl):
  objective = Objective(beta=0.1, kl=kl, kl_placement=placement)
  assert objective.needs_reference
  assert objective.kl_in_reward == (0.1 if placement == "reward" else 0)
  if (placement, kl) == ("reward", "k1"):
    assert "beta" not in loss_fn(objective).keywords
  elif kl in PLACEMENTS[placement]:
    bound = loss_fn(objective).keywords
    assert bound["beta"] == 0.1 and bound["kl"] is vars(kl_lib).get(kl)
    assert bound["kl_correction"] == (placement == "ratio")
  else:
    with pytest.raises(ValueError, match=f"kl = '{kl}': with kl_placement"):
      loss_fn(objective)


def test_what_is_off_is_not_there():
  objective = Objective()
  assert not objective.needs_reference and objective.kl_in_reward == 0
  assert correction_fn(objective) is None and not objective.has_entropy_bonus
  assert loss_fn(objective).keywords["surrogate"].keywords["dual_clip"] is None
  assert correction_fn(Objective(off_policy_threshold=0.1)) is not None
  assert Objective(entropy_target=0.2).has_entropy_bonus


def test_fields_are_bound_to_the_functions_that_ask_for_them():
  bound = loss_fn(Objective(surrogate="sapo", ratio="sequence_ratio")).keywords
  assert bound["ratio"] is surrogates.sequence_ratio
  assert bound["surrogate"].func is surrogates.sapo

  def mine(rewards, k, power):
    return k, power

  def bound_before(rewards, k):
    return k

  objective = Objective(advantage=mine, subset_size=3, score_power=1.5)
  assert advantage_fn(objective)(None) == (3, 1.5)
  before = functools.partial(bound_before, k=7)
  assert advantage_fn(Objective(advantage=before))(None) == 7

  def surrogate(ratios, logprobs, advantages, *, clip_low, cispo_max):
    return clip_low, cispo_max

  objective = Objective(surrogate=surrogate, clip_low=0.1, cispo_max=4.0)
  found = loss_fn(objective).keywords["surrogate"](None, None, None)
  assert found == (0.1, 4.0)
