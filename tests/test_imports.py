"""The import rule: core <- models <- {data, rewards, runtime} <- the rest."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "grpojax").rglob("*.py"))

# What of ours each part may import, besides itself. Whatever is not named here
# (the studies and the programs) may import everything.
MAY_IMPORT = {
  "": {"core", "models"},  # grpojax/__init__.py
  "core": set(),
  "models": {"core"},
  "data": {"core", "models"},
  "rewards": {"core", "models"},
  "runtime": {"core", "models"},
}
CORE_MAY_IMPORT = ("jax", "numpy", "optax", "flax.struct", "jaxtyping")
HEAVY = ("grain", "tensorflow_datasets", "transformers", "orbax")


def imported(path):
  """Dotted names of all that a file imports, at its top or inside functions."""
  package = path.relative_to(ROOT).parts[:-1]
  names = []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      up = package[: len(package) - node.level + 1] if node.level else ()
      base = ".".join([*up, *filter(None, [node.module])])
      names += [f"{base}.{alias.name}" for alias in node.names]
  return names


def within(name, packages):
  return any(name == p or name.startswith(p + ".") for p in packages)


def part_of(path):
  """The part of the package that a file belongs to: "core", ..., "train"."""
  parts = path.relative_to(ROOT / "grpojax").with_suffix("").parts
  return "" if parts == ("__init__",) else parts[0]


def test_every_part_is_here():
  assert set(MAY_IMPORT) <= {part_of(path) for path in MODULES}


@pytest.mark.parametrize(
  "path", MODULES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_run_one_way(path):
  part = part_of(path)
  names = imported(path)
  if part in MAY_IMPORT:
    allowed = [f"grpojax.{p}" for p in (*MAY_IMPORT[part], part) if p]
    ours = [name for name in names if within(name, ["grpojax"])]
    wrong = [name for name in ours if not within(name, allowed)]
    assert not wrong, f"grpojax.{part} must not import {wrong}"
  if part == "core":
    allowed = (*CORE_MAY_IMPORT, "grpojax.core", *sys.stdlib_module_names)
    wrong = [name for name in names if not within(name, allowed)]
    assert not wrong, f"grpojax.core must not import {wrong}"


def test_import_grpojax_is_light():
  code = f"import sys, grpojax; print([m for m in {HEAVY} if m in sys.modules])"
  result = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.strip() == "[]"
