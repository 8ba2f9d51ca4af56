"""Functions of a script as a module of their own, with all that they use.

Text is copied, and never run: what a statement uses is read from Python's
symbol table of it.
"""

import ast
import builtins
import symtable
from collections.abc import Sequence

HEADER = (
  '"""Functions of a TRL script, copied by python -m grpojax.translate."""'
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMMAND_LINE = ("parse_args", "parse_known_args", "parse_args_and_config")


def module_of(script: str, names: Sequence[str]) -> tuple[str, list[str]]:
  """Returns a module that defines `names`, and the names that it lacks.

  It has the script's statements that define them, and those that define or
  change what these use, in their order. The part under `if __name__ ==
  "__main__"` is left out.
  """
  statements = [x for x in ast.parse(script).body if not _is_main(x)]
  texts = [_text(script, one) for one in statements]
  imports = [
    x for x in statements if isinstance(x, ast.Import | ast.ImportFrom)
  ]
  imported = set().union(*map(_bound, imports))
  bound = [_bound(x) | (_changed(x) - imported) for x in statements]
  queue = list(names)
  needed: set[str] = set()
  chosen: set[int] = set()
  while queue:
    needed.add(name := queue.pop())
    for i, statement in enumerate(statements):
      future = getattr(statement, "module", "") == "__future__"
      if i not in chosen and (name in bound[i] or future or "*" in bound[i]):
        chosen.add(i)
        queue += _used(texts[i]) - needed
  defined = set().union({*dir(builtins), "__file__", "__name__"}, *bound)
  lacking = sorted(needed - defined) if "*" not in defined else []
  code = [texts[i] for i in sorted(chosen)]
  lacking += [x for x in _COMMAND_LINE if any(f".{x}(" in y for y in code)]
  blocks = [HEADER]
  for i in sorted(chosen):
    is_definition = isinstance(statements[i], _DEFINITIONS)
    blocks.append(f"\n\n{texts[i]}\n" if is_definition else texts[i])
  return "\n".join([*blocks, ""]), lacking


def _is_main(statement: ast.stmt) -> bool:
  return isinstance(statement, ast.If) and "__name__" in ast.unparse(
    statement.test
  )


def _text(script: str, statement: ast.stmt) -> str:
  """Returns a statement's text, with its decorators."""
  decorators = getattr(statement, "decorator_list", ())
  text = [f"@{ast.get_source_segment(script, x)}" for x in decorators]
  return "\n".join([*text, ast.get_source_segment(script, statement) or ""])


def _bound(statement: ast.stmt) -> set[str]:
  """Returns the names that a statement defines at the top."""
  if isinstance(statement, _DEFINITIONS):
    return {statement.name}
  bound = set()
  for node in ast.walk(statement):
    match node:
      case ast.Name(id=name, ctx=ast.Store()):
        bound.add(name)
      case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
        bound.add(name)
      case ast.alias(name=name, asname=other):
        bound.add(other or name.split(".")[0])
  return bound


def _changed(statement: ast.stmt) -> set[str]:
  """Returns names of values that a statement changes in place."""
  changed = set()
  if isinstance(statement, ast.Expr | ast.For | ast.Assign):
    for node in ast.walk(statement):
      match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
          changed.add(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
          changed |= set() if isinstance(statement, ast.Assign) else {name}
  return changed


def _used(text: str) -> set[str]:
  """Returns the names of the module that a statement uses."""
  used = set()
  tables = [symtable.symtable(text, "script", "exec")]
  while tables:
    table = tables.pop()
    tables += table.get_children()
    for symbol in table.get_symbols():
      if symbol.is_global() or table.get_type() == "module":
        used |= {symbol.get_name()} if symbol.is_referenced() else set()
  return used
