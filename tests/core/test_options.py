"""Options: ranges, choices, and errors that say all that is wrong at once."""

import dataclasses
import functools
import math
import re

import pytest

from grpojax.core.binding import asks_for
from grpojax.core.decoding import Decoding
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.losses.surrogates import SURROGATES
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
KINDS = (Sampling, Decoding, Objective, UpdateOptions)
DECLARED = [
  (kind, name, declared)
  for kind in KINDS
  for name, declared in declared_options(kind).items()
]


# Intervals.


@pytest.mark.parametrize(
  "within, inside, outside, words",
  [
    ("[1, inf)", (1, 2.5, 1e300), (0, 0.999, INF, NAN), "1 or more"),
    ("(0, inf)", (1e-300,), (0, -1, INF, NAN), "more than 0"),
    ("(0, inf]", (1e-300, INF), (0, -1, NAN), "more than 0"),
    ("[0, 1)", (0, 0.5), (1, -0.1, NAN), "in [0, 1)"),
    ("(0, 1]", (1, 0.5), (0, 1.1, -INF), "in (0, 1]"),
    (
      "[0, 2**31)",
      (0, 2**31 - 1),
      (2**31, -1),
      "0 or more, and less than 2**31",
    ),
  ],
)
def test_intervals(within, inside, outside, words):
  assert all(in_interval(within, x) for x in inside)
  assert not any(in_interval(within, x) for x in outside)
  assert interval_text(within) == words


@pytest.mark.parametrize("within", ["0, 1", "[0 1]", "[a, 1]", "[0, 1] ", ""])
def test_what_is_no_interval(within):
  with pytest.raises(ValueError):
    in_interval(within, 0.5)


# Values.


@pytest.mark.parametrize(
  "declared, value, text",
  [
    (
      Option(8, "of it", within="[1, inf)", words=("auto",)),
      0,
      "must be 1 or more, or auto (of it)",
    ),
    (Option(0.5, "how much", within="[0, 1)"), 1.0, "must be in [0, 1)"),
    (Option(1.0, "rate", within="(0, inf)"), INF, "more than 0, and finite"),
    (Option(1.0, "rate", within="(0, inf)"), NAN, "more than 0, and finite"),
    (Option("a", "which", ("a", "b")), "c", "use one of a, b (which)"),
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


def test_words_and_functions_may_stand_in_a_value_s_place():
  size = Option(8, "of it", within="[1, inf)", words=("auto",))
  assert refusal(size, "auto") is None
  assert refusal(Option("a", "which", {"a": max, "b": min}), len) is None


# Dataclasses.


def near_bounds(declared):
  """Numbers of the option's type at and just beside its bounds."""
  left, low, high, right = re.fullmatch(
    r"([\[(])(.+), (.+)([\])])", declared.within
  ).groups()
  integer = isinstance(declared.default, int)
  low, high = (
    2 ** int(x[3:]) if x.startswith("2**") else float(x) for x in (low, high)
  )
  step = 1 if integer else 1e-3
  number = int if integer else float
  inside = [number(low if left == "[" else low + step)]
  outside = [number(low - step if left == "[" else low)]
  if math.isfinite(high):
    inside.append(number(high if right == "]" else high - step))
    outside.append(number(high + step if right == "]" else high))
  elif not integer:
    (inside if right == "]" else outside).append(INF)
    outside.append(NAN)
  return inside, outside


@pytest.mark.parametrize(
  "kind, name, declared",
  [row for row in DECLARED if row[2].within],
  ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""),
)
def test_bounds(kind, name, declared):
  """Each option takes its interval, and no number beside it."""
  inside, outside = near_bounds(declared)
  readers = [x for x, f in SURROGATES.items() if asks_for(f, name)]
  reader = {"surrogate": readers[0]} if readers else {}
  for value in inside:
    assert getattr(kind(**{name: value}, **reader), name) == value
  for value in outside:
    with pytest.raises(ValueError) as error:
      kind(**{name: value})
    text = str(error.value)
    assert text.startswith(f"{name} = {value!r}: must be "), text
    assert declared.text in text and "\n" not in text


def test_a_declaration_is_a_field():
  @frozen_options
  class Two:
    size: int = option(3, "of it", within="[1, inf)")
    plain: int = 4

  assert {Two(), dataclasses.replace(Two(), size=3)} == {Two(size=3, plain=4)}
  expected = {"size": Option(3, "of it", within="[1, inf)")}
  assert declared_options(Two) == expected
  with pytest.raises(dataclasses.FrozenInstanceError):
    Two().size = 4
  with pytest.raises(ValueError, match=r"size = 0: must be 1 or more \(of it"):
    dataclasses.replace(Two(), size=0, plain=-1)


# Objective.


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"dual_clip": 0.5}, "dual_clip = 0.5: must be more than 1, or 0"),
    ({"correction_high": 0.5}, "correction_high = 0.5: must be 1 or more"),
    ({"advantage": "oracle"}, "advantage = 'oracle': needs the true value"),
  ],
)
def test_an_objective_s_gaps(changes, text):
  with pytest.raises(ValueError) as error:
    Objective(**changes)
  assert str(error.value).startswith(text)
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
    assert bound["beta"] == 0.1 and bound["kl"] is PLACEMENTS[placement][kl]
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


def test_a_single_update_is_on_policy():
  assert UpdateOptions(micro_batches=4).on_policy
  assert not UpdateOptions(epochs=2).on_policy
  assert not UpdateOptions(minibatches=2).on_policy
