"""Addition by people who forget to carry: 48+37=75.

A small model that has read their solutions makes their mistakes, and has
something to unlearn (see grpojax/assets/README.md).
"""

import numpy as np


def check_forget(forget: tuple[float, float]) -> None:
  """Raises ValueError where these are not two probabilities, low to high."""
  low, high = forget
  if not 0 <= low <= high <= 1:
    raise ValueError(
      f"forget = ({low}, {high}): is how often a carry is forgotten where the "
      "digits make 10, and where they make 19; 0 <= low <= high <= 1"
    )


def forgetful_sum(
  rng: np.random.Generator, a: int, b: int, forget: tuple[float, float]
) -> int:
  """Adds a and b in columns, as someone would who forgets some of the carries.

  The more the digits of a column make, the more often its carry is forgotten.
  What the first column makes is written out: 95+7 is 102 or 92.

  Args:
    rng: source of randomness; one draw for each carry.
    a: a whole number, not negative.
    b: likewise.
    forget: probability that a carry is forgotten where the digits make 10, and
      where they make 19; linear between them.

  Returns:
    The sum, right if no carry was forgotten.
  """
  low, high = forget
  columns = max(len(str(a)), len(str(b)))
  total = carry = 0
  for place in range(columns - 1):
    made = a // 10**place % 10 + b // 10**place % 10 + carry
    total += made % 10 * 10**place
    carry = made // 10
    if carry and rng.random() < low + (high - low) * (made - 10) / 9:
      carry = 0
  last = 10 ** (columns - 1)
  return total + (a // last + b // last + carry) * last
