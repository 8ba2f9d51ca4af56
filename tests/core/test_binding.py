"""Settings are bound to the functions that have parameters for them."""

import functools

from grpojax.core.binding import bind


def weighted(x, weights, *, power=1, offset=0):
  return x * weights**power + offset


def test_a_function_gets_what_it_asks_for_and_nothing_else():
  assert bind(weighted, weights=3, power=2, unknown=7)(2) == 18
  own = functools.partial(weighted, weights=5)  # stays
  assert bind(own, weights=3, offset=1)(2) == 11
  for function in (abs, dict, map, max):  # some have no signature
    assert bind(function, lengths=1) is function
