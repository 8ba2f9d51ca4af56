"""Libraries print no messages in our programs."""

import pathlib

import pytest
from run_helpers import python

HERE = pathlib.Path(__file__).parent
# A single process, because imports take most of the time. Its file descriptors
# include the output of C++ libraries.
PROGRAMS = """
import importlib.machinery, pathlib, runpy, sys

class WithoutPyTorch(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, *args):
    return None if name == "torch" else super().find_spec(name, *args)

place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = WithoutPyTorch
toy = runpy.run_path(sys.argv[1])
from grpojax import evaluate, export, train
model, run = sys.argv[2:]
short = dict(steps=1, eval__every=1, log__trackers="tensorboard")
arguments = toy["arguments"](pathlib.Path(model), **short)
with toy["task"]():
  train.main([*arguments, "--run_dir=" + run])
  evaluate.main(["--model=" + run, "--samples=2"])
  export.main([run, "--out", run + "-exported"])
"""


@pytest.mark.slow
def test_no_library_prints_messages(toy_model, tmp_path):
  run = tmp_path / "run"
  done = python("-c", PROGRAMS, HERE / "toy.py", toy_model, run)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  first, *_, last = done.stdout.splitlines()
  assert first.startswith(str(toy_model)) and last.startswith("step 1 of ")
  assert "WARNING" not in done.stdout and "INFO" not in done.stdout
