"""Reads settings from the syntax tree of a TRL script, which is never run.

Keywords of GRPOConfig, GRPOTrainer and LoraConfig are read if their values are
literals, names of literals or functions, or defaults of command-line options.
"""

import ast
import builtins
import collections
import contextlib
import pathlib
import symtable
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_HEADER = (
  '"""Functions of a TRL script, copied by python -m grpojax.translate."""'
)
_PARSES = ("parse_args", "parse_known_args", "parse_args_and_config")
_NO_SETTINGS = ("args", "processing_class", "peft_config", "**")
_POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
_PARSERS = ("parse_args_and_config", "parse_args_into_dataclasses")
_LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
"""Defaults of peft's LoraConfig, under the names of TRL's scripts."""
_LORA_NAMES = {
  name: f"lora_{name}" for name in ("r", "target_modules", "modules_to_save")
}
_CHANGES = ("map", "filter", "select", "rename_column", "rename_columns")
"""Methods that change a data set after `load_dataset`."""
_COMMAND_LINE = (
  "the script reads its settings from a command line: write them into a YAML"
  " file (KEY: VALUE), and set --yaml=FILE"
)
_DEFAULTS = (
  "set to the defaults of the script's command-line options: change them if you"
  " start it with other values"
)
_ENVIRONMENTS = (
  "has a parameter `environments`, which rewards do not get here: return the"
  " reward from the environment's method get_reward"
)


class Source(NamedTuple):
  """Settings read from a file."""

  settings: dict[str, Any]  # by dotted name
  unread: Mapping[str, str] = {}  # expressions of unknown value, by setting
  notes: Sequence[tuple[str, str]] = ()  # (setting, advice on missing values)
  code: str = ""  # module with the functions named by settings


class _Script(NamedTuple):
  """Syntax tree of a script, and the values of its names."""

  tree: ast.Module
  calls: list[ast.Call]
  assigned: dict[str, list[ast.AST]]  # values of each name, and their changes
  options: dict[str, Any]  # defaults of command-line options
  definitions: dict[str, ast.stmt]  # functions and classes at the top level
  imported: dict[str, str]  # "module:name" by name

  def value(self, node: ast.AST, seen: tuple[str, ...] = ()) -> Any:
    """Returns the value of an expression; ValueError if it is unknown."""
    match node:
      case ast.Name(id=name) if name not in seen and name in self.assigned:
        return self.value(self.only(node), (*seen, name))
      case ast.Attribute(value=ast.Name(), attr=name) if name in self.options:
        return self.options[name]
      case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=0)):
        return self.value(call, seen)  # model, tokenizer = from_pretrained()
      case ast.Call(func=ast.Attribute(value=owner, attr="from_pretrained")):
        names = [x for x in node.keywords if "model_name" in (x.arg or "")]
        models = [*node.args, *(x.value for x in names)]
        if models and "Peft" not in ast.unparse(owner):
          return self.value(models[0], seen)
      case ast.Call(func=ast.Name(id="dict"), args=[]):
        return {x.arg: self.value(x.value, seen) for x in node.keywords}
    return ast.literal_eval(node)

  def only(self, node: ast.AST) -> ast.AST:
    """Replaces a name that has a single value by this value."""
    values = self.assigned.get(getattr(node, "id", ""), ())
    return values[0] if len({*map(ast.dump, values)}) == 1 else node

  def names(self, node: ast.AST, kind: type, file: pathlib.Path) -> list[str]:
    """Lists functions or classes as "FILE.py:name" or "module:name".

    Strings stay as they are. ValueError for other expressions.
    """
    known = dict(self.imported)
    for name, definition in self.definitions.items():
      if type(definition) is kind:
        known[name] = f"{file}:{name}"
    if getattr(node, "id", None) not in known:
      node = self.only(node)
    nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [
      known.get(getattr(item, "id", None)) or str(ast.literal_eval(item))
      for item in nodes
    ]

  def loaded(self, node: ast.expr | None) -> tuple[ast.Call | None, Any]:
    """Returns the load_dataset call of a data set, and its ["split"] if any."""
    split = None
    for _ in range(100):
      # Each case follows one name, index or call back towards load_dataset.
      match node:
        case ast.Name(id=name) if name in self.assigned:
          node = self.assigned[name][0]
        case ast.Subscript(value=node, slice=ast.Constant(value=split)):
          pass
        case ast.Call(func=ast.Name(id=name)) if name in self.definitions:
          inside = ast.walk(self.definitions[name])
          returns = [x.value for x in inside if isinstance(x, ast.Return)]
          node = returns[-1] if returns else None
        case ast.Call() if called(node) == "load_dataset":
          return node, split
        case ast.Call(func=ast.Attribute(value=node)):
          pass
        case _:
          break
    return None, None


def called(node: ast.expr) -> str:
  """Returns the name of the function or method of a call, or ""."""
  function = getattr(node, "func", None)
  name = getattr(function, "attr", None) or getattr(function, "id", "")
  return name if isinstance(name, str) else ""


def read(
  text: str,
  path: pathlib.Path,
  parsed: Mapping[str, Any] = {},
  code: pathlib.Path | None = None,
) -> Source:
  """Reads the settings of a script `text` at `path`.

  `parsed` has values from the YAML file of its TrlParser. `code` is the file to
  which its functions will be copied; None leaves them in the script. ValueError
  if the script does not use GRPO.
  """
  script = _script(text, parsed)
  names_called = {called(x) for x in script.calls}
  if not names_called & {"GRPOConfig", "GRPOTrainer"}:
    raise ValueError("it calls neither GRPOConfig(...) nor GRPOTrainer(...)")
  settings, unread, defaults = _settings(script, parsed, code or path)
  if "LoraConfig" in names_called:
    settings = _LORA | settings
  # Notes on functions and settings that need a change by hand.
  functions = [*(settings.get("reward_funcs") or ())]
  functions += settings.get("tools") or ()
  functions.append(str(settings.get("environment_factory", "")))
  data, notes = _data(script)
  for name in functions:
    function = script.definitions.get(name.rpartition(":")[2])
    if isinstance(function, ast.FunctionDef):
      parameters = [*function.args.args, *function.args.kwonlyargs]
      if "environments" in [x.arg for x in parameters]:
        notes.append((function.name, _ENVIRONMENTS))
  if names_called & {*_PARSERS} and not parsed:
    notes.append(("TrlParser", _COMMAND_LINE))
  if defaults:
    notes.append((", ".join(defaults), _DEFAULTS))
  # Copy the named functions and all that they use.
  moved = [x.split(":")[-1] for x in functions if x.startswith(f"{code}:")]
  module, undefined = module_of(text, moved) if code and moved else ("", [])
  if undefined:
    advice = f"used in {code}, but undefined at the script's top level: add it"
    notes.append((", ".join(undefined), advice))
  for name in ("train_dataset", "eval_dataset"):
    unread.pop(name, None)
  return Source(settings | data, unread, notes, module)


def _settings(
  script: _Script, parsed: Mapping[str, Any], file: pathlib.Path
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
  """Returns settings, unread expressions, and names set to options' defaults.

  `file` has the functions and classes that settings name.
  """
  settings = dict(parsed)
  unread = {}
  defaults = []
  for name, node in _keywords(script):
    is_list = isinstance(script.only(node), ast.List | ast.Tuple)
    try:
      if name == "reward_funcs" or name == "tools" and is_list:
        settings[name] = script.names(node, ast.FunctionDef, file)
      elif name == "environment_factory":
        (settings[name],) = script.names(node, ast.ClassDef, file)
      elif name not in _NO_SETTINGS:
        settings[name] = script.value(node)
        if isinstance(node, ast.Attribute) and node.attr not in parsed:
          defaults.append(name)
    except (TypeError, ValueError):
      settings.pop(name, None)
      unread[name] = ast.unparse(node)[:80]
  return settings, unread, defaults


def _script(text: str, parsed: Mapping[str, Any]) -> _Script:
  tree = ast.parse(text)
  script = _Script(tree, [], collections.defaultdict(list), {}, {}, {})
  for node in ast.walk(tree):
    match node:
      case (
        ast.AugAssign(ast.Name(name))
        | ast.Assign([ast.Subscript(ast.Name(name))])
        | ast.Call(
          ast.Attribute(ast.Name(name), "append" | "extend" | "update")
        )
      ):
        # A change in place counts as a second value, so `only` keeps the name.
        script.assigned[name].append(node)
      case ast.Call():
        script.calls.append(node)
      case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
        ast.Name(name), value=ast.expr() as value
      ):
        script.assigned[name].append(value)
      case ast.Assign([ast.Tuple(elements)], value):
        for i, element in enumerate(elements):
          # The i-th of several names has the value `value[i]`.
          item = ast.Subscript(value, ast.Constant(i))
          script.assigned[ast.unparse(element)].append(item)
      case ast.ImportFrom(module=str() as module, level=0):
        for alias in node.names:
          imported = f"{module}:{alias.name}"
          script.imported[alias.asname or alias.name] = imported
  for statement in tree.body:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
      script.definitions[statement.name] = statement
  for name, value in _options(script):
    with contextlib.suppress(ValueError):
      script.options[name] = ast.literal_eval(value)
  script.options.update(parsed)
  return script


def _options(script: _Script) -> Iterator[tuple[str, ast.AST]]:
  """Yields (name, default) of argparse options and dataclass fields."""
  for call in script.calls:
    words = [x.value for x in call.args if isinstance(x, ast.Constant)]
    if called(call) == "add_argument" and words:
      keywords = {x.arg: x.value for x in call.keywords}
      word = next((x for x in words if str(x).startswith("--")), words[0])
      dest = getattr(keywords.get("dest"), "value", str(word).lstrip("-"))
      if "default" in keywords:
        yield dest.replace("-", "_"), keywords["default"]
      elif getattr(keywords.get("action"), "value", "") == "store_true":
        yield dest.replace("-", "_"), ast.Constant(False)
  for definition in script.definitions.values():
    if "dataclass" in " ".join(map(ast.unparse, definition.decorator_list)):
      for field in definition.body:
        value = getattr(field, "value", None)
        if isinstance(field, ast.AnnAssign) and value:
          keywords = {x.arg: x.value for x in getattr(value, "keywords", ())}
          yield ast.unparse(field.target), keywords.get("default", value)


def _keywords(script: _Script) -> Iterator[tuple[str, ast.AST]]:
  for call in script.calls:
    if called(call) not in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
      continue
    if called(call) == "GRPOTrainer":
      yield from zip(_POSITIONS, call.args, strict=False)
    for keyword in call.keywords:
      if keyword.arg is None:
        try:
          items = script.value(keyword.value).items()
          yield from ((key, ast.Constant(value)) for key, value in items)
        except (AttributeError, TypeError, ValueError):
          yield f"**{ast.unparse(keyword.value)}", keyword.value
      elif ast.unparse(keyword.value) != "None":
        yield _LORA_NAMES.get(keyword.arg, keyword.arg), keyword.value
  # An assignment under an `if` might not run, so its value is unknown: yield
  # the whole statement, which `value` cannot evaluate.
  branches = [x for x in ast.walk(script.tree) if isinstance(x, ast.If)]
  branches = [x for x in branches if "__name__" not in ast.unparse(x.test)]
  conditional = {id(node) for branch in branches for node in ast.walk(branch)}
  for node in ast.walk(script.tree):  # training_args.beta = 0.04
    match node:
      case ast.Assign(targets=[ast.Attribute(ast.Name(id=name), attr=key)]):
        made = script.assigned.get(name, [None])[0]
        made = made.value if isinstance(made, ast.Subscript) else made
        if called(made) in ("GRPOConfig", *_PARSERS):
          yield key, node if id(node) in conditional else node.value


def _data(script: _Script) -> tuple[dict[str, Any], list[tuple[str, str]]]:
  """Returns the data sets' settings, named as in TRL's scripts, and notes.

  The notes list settings and changes to make by hand.
  """
  keywords = dict(_keywords(script))
  train, split = script.loaded(keywords.get("train_dataset"))
  test, test_split = script.loaded(keywords.get("eval_dataset"))
  calls = [x for x in script.calls if called(x) == "load_dataset"]
  if "train_dataset" not in keywords:
    train = calls[0] if len(calls) == 1 else None
  elif train is None:
    text = "is created by the script: save it by .to_json('train.jsonl')"
    return {}, [("train_dataset", text)]
  if train is None:
    return {}, []
  names = ("dataset_name", "dataset_config", "dataset_train_split")
  values = _arguments(script, train, split)
  settings = dict(zip((*names, "data_files"), values, strict=True))
  files = settings["data_files"]
  if test is not None:
    *_, test_split, held_out = _arguments(script, test, test_split)
    settings["dataset_test_split"] = test_split
    settings["eval_data_files"] = None if held_out == files else held_out
  changes = {}
  for call in script.calls:
    if isinstance(call.func, ast.Attribute) and script.loaded(call)[0]:
      sizes = [x.value for x in call.keywords if x.arg == "test_size"]
      if sizes and isinstance(sizes[0], ast.Constant):
        settings["test_size"] = sizes[0].value
        settings |= {"dataset_train_split": None, "dataset_test_split": None}
      if called(call) in _CHANGES:
        changes[f".{called(call)}()"] = True
  notes = []
  if changes:
    text = f"not applied to the data set: {', '.join(changes)}: save the"
    text += " result by .to_json('train.jsonl'), and set"
    text += " --config.data.name=jsonl --config.data.path=train.jsonl"
    notes.append(("train_dataset", text))
  if files is ...:
    settings["dataset_name"] = None  # "json" is not a data set
  text = "is not a plain value: set data.path"
  notes += [(name, text) for name, x in settings.items() if x is ...]
  known = {k: x for k, x in settings.items() if x not in (None, ...)}
  return known, notes


def _arguments(
  script: _Script, call: ast.Call, split: Any
) -> tuple[Any, Any, Any, Any]:
  """Returns load_dataset's path, name, split and files; `...` if unknown."""
  nodes = dict(zip(("path", "name"), call.args, strict=False))
  nodes |= {x.arg or "**": x.value for x in call.keywords}
  values = dict.fromkeys(("path", "name", "split", "data_files"))
  for name in values.keys() & nodes.keys():
    values[name] = ...
    with contextlib.suppress(TypeError, ValueError):
      values[name] = script.value(nodes[name])
  path, configuration, splits, files = values.values()
  if isinstance(splits, list) and isinstance(split, int):
    split = splits[split]
  elif not isinstance(split, str):
    split = splits
  # Take the files of the chosen split, which is then the only split.
  if isinstance(files, dict):
    files = files.get(split or "train")
    split = None
  return path, configuration, split, files


def module_of(script: str, names: Sequence[str]) -> tuple[str, list[str]]:
  """Returns a module that defines `names`, and all names left undefined.

  Copies the statements of the script that define these names, or that define or
  change values used by the copies, except `if __name__ == "__main__"`. Symbol
  tables list the names that a statement uses; the script is never run.
  """
  statements = [
    x
    for x in ast.parse(script).body
    if not (isinstance(x, ast.If) and "__name__" in ast.unparse(x.test))
  ]
  symbols = symtable.symtable(script, "script", "exec").get_symbols()
  imported = {x.get_name() for x in symbols if x.is_imported()}
  texts = []
  tables = []
  bound = []
  starred = set()  # `import *`
  always = set()  # also `from __future__`
  for i, statement in enumerate(statements):
    texts.append(_text(script, statement))
    tables.append(symtable.symtable(texts[i], "script", "exec"))
    symbols = tables[i].get_symbols()
    defined = [x for x in symbols if x.is_assigned() or x.is_imported()]
    changed = _changed(statement) - imported
    bound.append({x.get_name() for x in defined} | changed)
    if any(getattr(x, "name", "") == "*" for x in ast.walk(statement)):
      starred.add(i)
    if i in starred or getattr(statement, "module", "") == "__future__":
      always.add(i)
  # Choose statements until every needed name is defined.
  queue = list(names)
  needed: set[str] = set()
  chosen: set[int] = set()
  while queue:
    needed.add(name := queue.pop())
    defining = {i for i, defined in enumerate(bound) if name in defined}
    for i in (defining | always) - chosen:
      chosen.add(i)
      queue += _used(tables[i]) - needed
  defined = set().union({*dir(builtins), "__file__", "__name__"}, *bound)
  lacking = [] if starred else sorted(needed - defined)
  # Write the chosen statements in their order in the script.
  blocks = [_HEADER]
  for i in sorted(chosen):
    is_definition = hasattr(statements[i], "decorator_list")
    blocks.append(f"\n\n{texts[i]}\n" if is_definition else texts[i])
  module = "\n".join([*blocks, ""])
  return module, lacking + [x for x in _PARSES if f".{x}(" in module]


def _text(script: str, statement: ast.stmt) -> str:
  decorators = getattr(statement, "decorator_list", ())
  text = [f"@{ast.get_source_segment(script, x)}" for x in decorators]
  return "\n".join([*text, ast.get_source_segment(script, statement) or ""])


def _changed(statement: ast.stmt) -> set[str]:
  """Returns the names of values that a statement changes in place."""
  changed = set()
  if isinstance(statement, ast.Expr | ast.For | ast.Assign):
    for node in ast.walk(statement):
      match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
          changed.add(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
          changed |= set() if isinstance(statement, ast.Assign) else {name}
  return changed


def _used(table: symtable.SymbolTable) -> set[str]:
  """Returns the module-level names in a statement."""
  symbols = [x for x in table.get_symbols() if x.is_referenced()]
  if table.get_type() != "module":
    symbols = [x for x in symbols if x.is_global()]
  used = {x.get_name() for x in symbols}
  return used.union(*map(_used, table.get_children()))
