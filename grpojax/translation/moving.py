"""Functions of a script as a module of their own, with all that they use.

Text is copied, and never run: symbol tables list the names that it uses.
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
  whole = symtable.symtable(script, "script", "exec")
  imported = {x.get_name() for x in whole.get_symbols() if x.is_imported()}
  bound = [
    _bound(text) | (_changed(one) - imported)
    for text, one in zip(texts, statements, strict=True)
  ]
  starred = {i for i, one in enumerate(statements) if _is_starred(one)}
  is_future = lambda one: getattr(one, "module", "") == "__future__"
  always = starred | {i for i, x in enumerate(statements) if is_future(x)}
  queue = list(names)
  needed: set[str] = set()
  chosen: set[int] = set()
  while queue:
    needed.add(name := queue.pop())
    defining = {i for i, defined in enumerate(bound) if name in defined}
    for i in (defining | always) - chosen:
      chosen.add(i)
      queue += _used(texts[i]) - needed
  defined = set().union({*dir(builtins), "__file__", "__name__"}, *bound)
  lacking = [] if starred else sorted(needed - defined)
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


def _is_starred(statement: ast.stmt) -> bool:
  """Returns True if a statement imports `*`."""
  return any(getattr(x, "name", "") == "*" for x in ast.walk(statement))


def _bound(text: str) -> set[str]:
  """Returns the names that a statement defines at the top."""
  symbols = symtable.symtable(text, "script", "exec").get_symbols()
  return {x.get_name() for x in symbols if x.is_assigned() or x.is_imported()}


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
