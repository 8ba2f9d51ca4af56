"""colab_grpo.ipynb is valid, its commands are, and it runs."""

import ast
import json
import re
import resource
import shlex
import shutil

import pytest
from run_helpers import ROOT

from grpojax import train
from grpojax.runtime.cli import command_line
from grpojax.training.config import SETTINGS, from_config

PATH = ROOT / "launch" / "colab_grpo.ipynb"
NOTEBOOK = json.loads(PATH.read_text())
CODE = [
  "".join(cell["source"])
  for cell in NOTEBOOK["cells"]
  if cell["cell_type"] == "code"
]


def trainings():
  """Returns the training commands as lists of words."""
  text = "\n".join(CODE).replace("\\\n", "")
  lines = re.findall(r"^ *!(.*)$", text, re.MULTILINE)
  commands = [shlex.split(line) for line in lines]
  return [words for words in commands if "grpojax.train" in words]


def test_the_notebook_is_valid_and_has_no_outputs():
  for cell in NOTEBOOK["cells"]:
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None
  for code in CODE:
    lines = code.replace("\\\n", "")
    ast.parse(re.sub(r"^( *)!.*$", r"\1pass", lines, flags=re.MULTILINE))
  nbformat = pytest.importorskip("nbformat", reason=".ci/run installs it")
  nbformat.validate(nbformat.read(PATH, as_version=4))


@pytest.mark.parametrize("words", trainings())
def test_training_commands_are_valid(words, monkeypatch):
  monkeypatch.chdir(ROOT)
  arguments = words[words.index("grpojax.train") + 1 :]
  config, flags = command_line.parse(arguments, train.FLAGS, SETTINGS)
  from_config(config)
  assert flags.run_dir


@pytest.mark.long  # it trains
def test_it_runs_on_a_cpu(tmp_path, monkeypatch):
  nbformat = pytest.importorskip("nbformat", reason=".ci/run installs it")
  nbclient = pytest.importorskip("nbclient", reason=".ci/run installs it")
  pytest.importorskip("ipykernel", reason=".ci/run installs it")
  for name in ("grpojax", "configs"):
    shutil.copytree(ROOT / name, tmp_path / name)
  for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
    monkeypatch.delenv(name, raising=False)  # set by conftest
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  notebook = nbformat.read(PATH, as_version=4)
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  nbclient.NotebookClient(
    notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
  ).execute()
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  cells = [c for c in notebook.cells if c.cell_type == "code"]
  texts = ["".join(o.get("text", "") for o in c.outputs) for c in cells]
  outputs = [output for cell in cells for output in cell.outputs]
  assert sum("image/png" in o.get("data", {}) for o in outputs) == 1
  text = "\n".join(texts)
  accuracy = re.search(r"held-out accuracy: ([\d.]+)% -> ([\d.]+)%", text)
  assert float(accuracy[1]) < 40 and float(accuracy[2]) > 85
  assert "is finished: nothing to do" in text
  assert "step 10, reward" in text and "step 60, reward" in text
  assert "no accelerator on this runtime" in text
  assert texts[-1] == texts[-2] == ""
  assert seconds < 360
