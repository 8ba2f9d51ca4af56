"""Settings are bound to the functions that have parameters for them."""

import functools

import pytest

from grpojax.core.binding import bind


def weighted(x, weights, *, power=1, offset=0):
  return x * weights**power + offset


def test_a_function_gets_what_it_asks_for_and_nothing_else():
  bound = bind(weighted, weights=3, power=2, unknown=7)
  assert bound(2) == 18
  assert bind(abs, weights=3) is abs
  assert bind(lambda x: x, weights=3)(5) == 5


def test_what_is_bound_already_stays():
  own = functools.partial(weighted, weights=5)
  assert bind(own, weights=3, offset=1)(2) == 11


@pytest.mark.parametrize("function", [dict, map, max])
def test_functions_without_a_signature_take_nothing(function):
  assert bind(function, lengths=1) is function
