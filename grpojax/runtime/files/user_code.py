"""Import of a user's Python files, such as rewards and configs.

Repeated loads return the same module, so classes can be pickled and functions
share globals. A file may import files next to it. A file in a package (a
directory with `__init__.py`) is imported as a module of the package.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType


def load(path: str) -> ModuleType:
  """Imports a file; returns the same module again if its text is the same.

  OSError if there is no file; ImportError if another module has its name, or
  the name of a neighbouring file that it imports. Can be retried after errors.
  """
  file = pathlib.Path(path).resolve()
  if not file.exists():
    raise OSError(f"there is no file {file}")
  text = file.read_bytes()
  root, name = _home(file)
  if root == file.parent:  # outside of a package
    mark = hashlib.sha256(str(file).encode() + text).hexdigest()[:12]
    name = f"_user_{file.stem}_{mark}"
  with _importable(root):
    if root != file.parent:
      module = importlib.import_module(name)
    else:
      module = sys.modules.get(name) or _execute(name, file, text)
  if pathlib.Path(module.__file__ or "").resolve() != file:
    raise ImportError(f"rename {file}: {module.__file__} is imported as {name}")
  _check_neighbours(module, root)
  return module


def _home(file: pathlib.Path) -> tuple[pathlib.Path, str]:
  """Returns the root directory for importing a file, and its module name."""
  root = file.parent
  name = file.stem
  while (root / "__init__.py").is_file():
    root, name = root.parent, f"{root.name}.{name}"
  return root, name


def sources(place: str) -> dict[str, str]:
  """Returns the texts of a file and of all files that it imports, by path.

  `place` is a file or an imported module. Includes indirect imports, and
  imports inside functions, but no installed modules. Does not run the files.
  """
  shown = pathlib.PurePath(place)
  path = place
  if not place.endswith(".py"):
    shown = pathlib.PurePath(*place.split("."))
    path = getattr(sys.modules.get(place), "__file__", None) or ""
  file = pathlib.Path(path).resolve()
  installed = {"site-packages", "dist-packages"} & {*file.parts}
  if installed or shown.parts[0] == "grpojax":
    return {}
  root, name = _home(file)
  texts: dict[str, str] = {}
  waiting = [(root, name)]
  while waiting:
    base, name = waiting.pop()
    for part in itertools.accumulate(name.split("."), os.path.join):
      for source in (base / f"{part}.py", base / part / "__init__.py"):
        relative = os.path.relpath(source, file.parent)
        key = os.path.normpath(shown.parent / relative)
        if key not in texts and source.is_file():
          text = source.read_bytes()
          texts[key] = text.decode(errors="replace")
          waiting += _imports(text, root, source)
  return texts


def _imports(
  text: bytes, root: pathlib.Path, file: pathlib.Path
) -> Iterator[tuple[pathlib.Path, str]]:
  """Yields (directory, name) per import of a file."""
  with contextlib.suppress(SyntaxError, ValueError):  # `load` raises them
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Import):
        yield from ((root, alias.name) for alias in node.names)
      elif isinstance(node, ast.ImportFrom):
        base = file.parents[node.level - 1] if node.level else root
        module = f"{node.module}." if node.module else ""
        yield from ((base, module + alias.name) for alias in node.names)


def _execute(name: str, file: pathlib.Path, text: bytes) -> ModuleType:
  spec = importlib.util.spec_from_file_location(name, file)
  if spec is None:
    raise ImportError(f"{file} is no Python file: its name must end with .py")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # for dataclasses and pickle
  try:  # without the loader, whose cached bytecode may be outdated
    exec(compile(text, str(file), "exec"), vars(module))
  except BaseException:
    del sys.modules[name]
    raise
  return module


_directory = [os.curdir]  # working directory of user code


@contextlib.contextmanager
def own_directory() -> Iterator[None]:
  """Gives user code its own working directory, which it may change.

  The program's directory stays: its paths (run, data, models) may be relative.
  """
  program = _working_directory()
  with contextlib.suppress(OSError):
    os.chdir(_directory[0])
  try:
    yield
  finally:
    user = _working_directory()
    _directory[0] = os.curdir if user == program else user
    with contextlib.suppress(OSError):
      os.chdir(program)


def _working_directory() -> str:
  try:
    return os.getcwd()
  except FileNotFoundError:  # it was removed
    return os.curdir


@contextlib.contextmanager
def _importable(root: pathlib.Path) -> Iterator[None]:
  """Puts a directory first on the import path, and last at the context's end.

  User functions may import later, but must not shadow this program's imports.
  """
  sys.path.insert(0, str(root))
  try:
    with own_directory():
      yield
  finally:
    sys.path.remove(str(root))
    if str(root) not in sys.path:
      sys.path.append(str(root))


def _check_neighbours(module: ModuleType, root: pathlib.Path) -> None:
  """Raises ImportError if another module hides a file next to `module`."""
  for value in vars(module).values():
    name = value.__name__ if isinstance(value, ModuleType) else ""
    name = name or getattr(value, "__module__", None) or ""
    top = str(name).partition(".")[0]
    beside = root / f"{top}.py"
    other = getattr(sys.modules.get(top), "__file__", None)
    if beside.is_file() and other and pathlib.Path(other).resolve() != beside:
      raise ImportError(
        f"{module.__file__} imports {top}, and there are two: {beside} and "
        f"{other}; rename one of them"
      )
