"""The import rule, of every module:

core <- statistics <- reports; core <- models <- data <- rewards;
models <- runtime <- rewards; all of these <- training <- aot, studies,
programs;
aot <- benchmarks
"""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpojax"
MODULES = sorted(PACKAGE.rglob("*.py"))
every_module = pytest.mark.parametrize(
  "path", MODULES, ids=lambda path: str(path.relative_to(ROOT))
)

# What of ours each part may import, besides itself. A program is a part of its
# own: none is imported by anything.
MAY_IMPORT = {
  "": {"core", "statistics", "models"},  # grpojax/__init__.py
  "__main__": {"runtime"},  # it finds the programs on the disk
  "core": set(),
  "statistics": {"core"},
  "models": {"core"},
  "data": {"core", "models"},
  "rewards": {"core", "models", "data", "runtime"},
  "runtime": {"core", "models"},
  "reports": {"statistics"},
}
MAY_IMPORT["environments"] = {"rewards", *MAY_IMPORT["rewards"]}
MAY_IMPORT["training"] = {"statistics", "reports", "environments"}
MAY_IMPORT["training"] |= MAY_IMPORT["environments"]
STUDIES = {*MAY_IMPORT["training"], "training"}
PROGRAMS = {"train", "evaluate", "export", "chat", "sft", "compile", "bench"}
PROGRAMS |= {"report", "translate", "selfcheck"}
for _part in ("studies", "examples", "aot", "translation", *PROGRAMS):
  MAY_IMPORT[_part] = STUDIES
MAY_IMPORT["benchmarks"] = MAY_IMPORT["compile"] = {*STUDIES, "aot"}
MAY_IMPORT["translate"] = {*STUDIES, "translation"}
MAY_IMPORT["bench"] = {*MAY_IMPORT["benchmarks"], "benchmarks"}
MAY_IMPORT["selfcheck"] = MAY_IMPORT["bench"]
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
  parts = path.relative_to(PACKAGE).with_suffix("").parts
  return "" if parts == ("__init__",) else parts[0]


def test_every_part_has_a_rule():
  assert set(MAY_IMPORT) == {part_of(path) for path in MODULES}
  loose = {path.stem for path in PACKAGE.glob("*.py")}
  assert loose == PROGRAMS | {"__init__", "__main__"}


@every_module
def test_imports_run_one_way(path):
  part, names = part_of(path), imported(path)
  allowed = [f"grpojax.{p}" for p in (*MAY_IMPORT[part], part) if p]
  ours = [name for name in names if within(name, ["grpojax"])]
  if part == "examples":  # by the public names, as users have them
    ours = [name for name in ours if name != "grpojax"]
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


# Functions with plain arguments can be called by other people's programs. A
# config is read where a command line or a file brings one in, and becomes
# typed settings there; programs and studies read their own.
ENTRANCES = {
  *(f"runtime/cli/{x}.py" for x in ("command_line", "config", "config_file")),
  *(f"runtime/cli/{x}.py" for x in ("help_text", "settings")),
  "training/config.py",
  "training/run/run_directory.py",
  "training/run_models.py",
  "benchmarks/workloads.py",
  "translation/writing.py",
}


@every_module
def test_a_config_is_read_at_an_entrance_only(path):
  if part_of(path) not in PROGRAMS | {"studies"}:
    reads = any(within(n, ["ml_collections"]) for n in imported(path))
    assert not reads or str(path.relative_to(PACKAGE)) in ENTRANCES
