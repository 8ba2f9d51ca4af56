"""The import rule of the package:

core <- statistics <- reports; core <- models <- data <- rewards;
models <- runtime <- rewards; all of these <- training <- aot, studies,
programs;
aot <- benchmarks
"""

import ast
import pathlib
import sys

import pytest
from run_helpers import ROOT, python

import grpojax

PACKAGE = ROOT / "grpojax"
MODULES = sorted(PACKAGE.rglob("*.py"))
every_module = pytest.mark.parametrize(
  "path", MODULES, ids=lambda path: str(path.relative_to(ROOT))
)

# Parts that each part may import. Programs are parts that no part imports.
MAY_IMPORT = {
  "": {"core", "statistics", "models"},  # grpojax/__init__.py
  "__main__": {"runtime"},  # finds the programs on the disk
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
LAYERS = (
  "settings config files policies data step evaluation report run".split()
)
"""Parts of training, each of which imports only itself and parts before it."""
CORE_MAY_IMPORT = ("jax", "numpy", "optax", "flax.struct", "jaxtyping")
HEAVY = ("grain", "tensorflow_datasets", "transformers", "orbax")


def imported(path):
  """Dotted names of all imports of a file, also inside functions."""
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


def test_every_part_has_an_import_rule():
  assert set(MAY_IMPORT) == {part_of(path) for path in MODULES}
  loose = {path.stem for path in PACKAGE.glob("*.py")}
  assert loose == PROGRAMS | {"__init__", "__main__"}


@every_module
def test_imports_follow_the_rule(path):
  part = part_of(path)
  names = imported(path)
  allowed = [f"grpojax.{p}" for p in (*MAY_IMPORT[part], part) if p]
  ours = [name for name in names if within(name, ["grpojax"])]
  if part == "examples":  # which use the public names
    ours = [name for name in ours if name != "grpojax"]
  wrong = [name for name in ours if not within(name, allowed)]
  assert not wrong, f"grpojax.{part} must not import {wrong}"
  if part == "core":
    allowed = (*CORE_MAY_IMPORT, "grpojax.core", *sys.stdlib_module_names)
    wrong = [name for name in names if not within(name, allowed)]
    assert not wrong, f"grpojax.core must not import {wrong}"


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_training_import_no_later_layer(layer):
  training = PACKAGE / "training"
  later = LAYERS[LAYERS.index(layer) + 1 :]
  names = [f"grpojax.training.{part}" for part in later]
  paths = [training / f"{layer}.py", *(training / layer).glob("*.py")]
  wrong = {
    path.name: ours
    for path in filter(pathlib.Path.exists, paths)
    if (ours := [name for name in imported(path) if within(name, names)])
  }
  assert not wrong
  assert {path.stem for path in training.glob("[!_]*")} == {*LAYERS}


def test_import_grpojax_loads_no_heavy_library():
  code = f"import sys, grpojax; print([m for m in {HEAVY} if m in sys.modules])"
  result = python("-c", code)
  assert result.returncode == 0, result.stderr
  assert result.stdout.strip() == "[]"


def test_public_names_come_from_core_statistics_and_models():
  assert len(grpojax.__all__) >= 22 and set(grpojax.__all__) <= set(
    dir(grpojax)
  )
  for name in grpojax.__all__:
    assert getattr(grpojax, name).__name__.rpartition(".")[2] == name
  assert callable(grpojax.rollout) and callable(grpojax.losses.grpo_loss)
  assert grpojax.core.batch.make_batch is grpojax.make_batch
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    _ = grpojax.nothing
  parts = {module.split(".")[1] for module in grpojax._NAMES}
  assert parts == {"core", "statistics", "models"}
