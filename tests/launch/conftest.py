"""Stand-ins for programs of clusters (see stand_ins.py)."""

import importlib.util
import pathlib

import pytest

_spec = importlib.util.spec_from_file_location(
  "stand_ins", pathlib.Path(__file__).with_name("stand_ins.py")
)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


@pytest.fixture(scope="session")
def stand_ins():
  return _module
