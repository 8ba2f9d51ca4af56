"""The import rule, of every module:

    core <- statistics <- reports; core <- models <- data <- rewards;
    models <- runtime <- rewards; all of these <- training <- aot, studies,
    programs;
    aot <- benchmarks

`python tests/test_imports.py [ROOT]` draws what imports what, of any checkout.
"""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "grpojax").rglob("*.py"))

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
}
MAY_IMPORT["environments"] = {"rewards", *MAY_IMPORT["rewards"]}
MAY_IMPORT["reports"] = {"statistics"}
MAY_IMPORT["training"] = {"statistics", "runtime", *MAY_IMPORT["rewards"]}
MAY_IMPORT["training"] |= {"rewards", "reports", "environments"}
MAY_IMPORT["studies"] = {*MAY_IMPORT["training"], "training"}
MAY_IMPORT["examples"] = MAY_IMPORT["studies"]
MAY_IMPORT["aot"] = MAY_IMPORT["studies"]
MAY_IMPORT["benchmarks"] = {*MAY_IMPORT["studies"], "aot"}
MAY_IMPORT["translation"] = MAY_IMPORT["studies"]
PROGRAMS = {"train", "evaluate", "export", "chat", "sft", "compile", "bench"}
PROGRAMS |= {"report", "translate", "selfcheck"}
MAY_IMPORT |= {name: MAY_IMPORT["studies"] for name in PROGRAMS}
MAY_IMPORT["translate"] = {*MAY_IMPORT["studies"], "translation"}
MAY_IMPORT["compile"] = {*MAY_IMPORT["studies"], "aot"}
MAY_IMPORT["bench"] = {*MAY_IMPORT["benchmarks"], "benchmarks"}
MAY_IMPORT["selfcheck"] = MAY_IMPORT["bench"]
CORE_MAY_IMPORT = ("jax", "numpy", "optax", "flax.struct", "jaxtyping")
HEAVY = ("grain", "tensorflow_datasets", "transformers", "orbax")


def imported(path, root=ROOT):
  """Dotted names of all that a file imports, at its top or inside functions."""
  package = path.relative_to(root).parts[:-1]
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


def part_of(path, root=ROOT):
  """The part of the package that a file belongs to: "core", ..., "train"."""
  parts = path.relative_to(root / "grpojax").with_suffix("").parts
  return "" if parts == ("__init__",) else parts[0]


def test_every_part_has_a_rule():
  assert set(MAY_IMPORT) == {part_of(path) for path in MODULES}


def test_only_programs_stand_beside_the_parts():
  loose = {path.stem for path in (ROOT / "grpojax").glob("*.py")}
  assert loose == PROGRAMS | {"__init__", "__main__"}


@pytest.mark.parametrize(
  "path", MODULES, ids=lambda path: str(path.relative_to(ROOT))
)
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


# Whoever takes plain arguments can be called by other people's programs. A
# config is read where a command line or a file brings one in, and becomes
# typed settings there.
ENTRANCES = {
  "runtime": {
    f"runtime/cli/{name}.py"
    for name in (
      "command_line",
      "config",
      "config_file",
      "help_text",
      "settings",
    )
  },
  "training": {
    "training/config.py",
    "training/run/run_directory.py",
    "training/run_models.py",
  },
  "benchmarks": {"benchmarks/workloads.py"},
  "translation": {"translation/writing.py"},
}


@pytest.mark.parametrize(
  "path", MODULES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_config_is_read_at_an_entrance_only(path):
  part = part_of(path)
  if part in PROGRAMS or part == "studies":  # studies have their own configs
    return
  name = str(path.relative_to(ROOT / "grpojax"))
  reads = any(within(n, ["ml_collections"]) for n in imported(path))
  assert not reads or name in ENTRANCES.get(part, ())


def draw(root):
  """Prints what each part imports; below it, its files that import others."""
  parts = {}
  for path in sorted((root / "grpojax").rglob("*.py")):
    part = part_of(path, root) or "grpojax"
    names = [n for n in imported(path, root) if within(n, ["grpojax"])]
    others = {n.removeprefix("grpojax.").split(".")[0] for n in names} - {part}
    parts.setdefault(part, {})[path.stem] = others
  for part, files in parts.items():
    print(f"{part} <- {', '.join(sorted(set().union(*files.values()))) or '-'}")
    for name, others in files.items():
      if len(files) > 1 and others:
        print(f"    {name:22} {' '.join(sorted(others))}")


if __name__ == "__main__":
  draw(pathlib.Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT)
