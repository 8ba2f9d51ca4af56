"""Seeds Python's and NumPy's global random numbers around a user's code."""

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def seeded(*values: Any) -> Iterator[None]:
  """Seeds `random` and `numpy.random` by JSON values, and restores them after.

  A step that is played again draws the same numbers, in any process.
  """
  text = json.dumps(values, sort_keys=True)
  seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
  before = random.getstate()
  numpy_before = np.random.get_state()
  try:
    random.seed(seed)
    np.random.seed(seed)
    yield
  finally:
    random.setstate(before)
    np.random.set_state(numpy_before)
