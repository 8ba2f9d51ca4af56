"""What the tests of reports share."""

import pytest
from reports import made_up as runs


@pytest.fixture(scope="session")
def made_up():
  return runs
