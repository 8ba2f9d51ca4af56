"""What the tests of reports share."""

import importlib.util
import pathlib

import pytest

_spec = importlib.util.spec_from_file_location(
  "made_up", pathlib.Path(__file__).with_name("made_up.py")
)
_made_up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_made_up)


@pytest.fixture(scope="session")
def made_up():
  return _made_up
