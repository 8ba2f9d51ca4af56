"""Libraries are imported without a word, where there is no PyTorch, too."""

import ast
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOAD = """
import os, sys
sys.modules["torch"] = None  # as where it is not installed
from grpojax.models import hf
from grpojax.runtime import tokenizer
loaded = tokenizer.load(hf.resolve("arithmetic-instruct"))
print(loaded.encode("1+1"))
print([name for name in os.environ if name.startswith("TRANSFORMERS_")])
"""


def test_a_tokenizer_is_loaded_without_pytorch_and_without_a_word():
  done = subprocess.run(
    [sys.executable, "-c", LOAD],
    env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  ids, left = done.stdout.splitlines()
  assert done.stderr == "" and len(ast.literal_eval(ids)) == 3
  assert left == "[]"  # later warnings are not silenced


def test_nobody_else_imports_transformers():
  for path in (ROOT / "grpojax").rglob("*.py"):
    if path.name == "quiet_imports.py":
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
      assert not any(n.split(".")[0] == "transformers" for n in names), path
