"""The tokenizer of a GGUF file, as the files of a Hugging Face directory.

A file has the vocabulary, the merges and the name of a rule by which texts are
cut before anything is merged. A rule that is not known for certain is refused:
another one would give other tokens than the model was trained on, and no error.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from grpojax.models.huggingface.gguf_config import ID
from grpojax.models.huggingface.gguf_file import File

_PREFIX = "tokenizer.ggml."
_DIRECTORY = (
  "get the model as a Hugging Face directory, which has tokenizer.json"
)
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
  """Cutting of texts before merges.

  Attributes:
    pattern: pieces to cut out first; None is GPT-2's pattern.
    digits: True where each digit is cut out before.
    nfc: True where Unicode is composed first.
    whole: True where a piece that is a token is not merged.
    bos: True where BOS is put before a text that has no template, unless the
      file says otherwise.
  """

  pattern: str | None = None
  digits: bool = False
  nfc: bool = False
  whole: bool = False
  bos: bool = False


RULES = {
  "gpt-2": _Rule(),
  "smollm": _Rule(digits=True),
  "qwen2": _Rule(_WORDS.replace("DIGITS", r"\p{N}"), nfc=True),
  "llama-bpe": _Rule(
    _WORDS.replace("DIGITS", r"\p{N}{1,3}"), whole=True, bos=True
  ),
}
"""Rules by tokenizer.ggml.pre, of the tokenizer.json that the models have."""

_READ = {"model", "pre", "tokens", "token_type", "merges", "add_bos_token"}
_FIXED = {"add_eos_token": False, "add_space_prefix": False}
_UNUSED = {"scores", "token_type_count"}
_IDS = "bos eos eot eom unknown padding seperator mask cls prefix suffix middle"
_FILLING = "fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"
# Types of tokens. Unused ones only fill up the embedding.
_NORMAL, _CONTROL, _ADDED, _EMPTY = 1, 3, 4, 5


def texts(file: File) -> dict[str, str]:
  """Returns tokenizer.json and tokenizer_config.json, by these names.

  Raises:
    ValueError: a kind of tokenizer that is not known, unknown keys, or a
      damaged vocabulary.
  """
  values = _values(file)
  tokens, rule = values["tokens"], RULES[values["pre"]]
  token = {key: tokens[i] for key, i in _ids(file, values).items()}
  try:
    backend = _backend(rule, tokens, values["token_type"], values["merges"])
    if values.get("add_bos_token", rule.bos):
      backend.post_processor = _beginning(token["bos"], tokens)
  except Exception as error:  # of the library's own kinds
    raise ValueError(
      f"{file.path}: its tokenizer does not fit together ({error!r:.200}): "
      f"{_DIRECTORY}"
    ) from error
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": token.get("bos"),
    "eos_token": token.get("eos"),
    "unk_token": token.get("unknown"),
    "pad_token": token.get("padding"),
    "clean_up_tokenization_spaces": False,
    "chat_template": file.metadata.get("tokenizer.chat_template"),
  }
  settings = {k: v for k, v in settings.items() if v is not None}
  return {
    "tokenizer.json": backend.to_str(),
    "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
  }


def _values(file: File) -> dict[str, Any]:
  """Returns the values below tokenizer.ggml, checked but for ids."""
  values = {
    key.removeprefix(_PREFIX): value
    for key, value in file.metadata.items()
    if key.startswith(_PREFIX)
  }
  kind, pre = (repr(values.get(key))[:80] for key in ("model", "pre"))
  if values.get("model") != "gpt2":
    problem = f"model={kind}; only 'gpt2', byte-level BPE, is read"
  elif values.get("pre") not in list(RULES):
    problem = f"pre={pre}; known are {', '.join(RULES)}"
  elif unknown := values.keys() - _known():
    problem = f"{', '.join(sorted(unknown))}, which is not known"
  elif changed := [k for k, v in _FIXED.items() if values.get(k, v) is not v]:
    problem = f"{changed[0]}, of which only {_FIXED[changed[0]]} is known"
  else:
    _check_vocabulary(file, values)
    return values
  raise ValueError(f"{file.path} has {_PREFIX}{problem}: {_DIRECTORY}")


def _known() -> set[str]:
  """Returns the keys below tokenizer.ggml that change nothing, or are read."""
  ids = {f"{name}_token_id" for name in f"{_IDS} {_FILLING}".split()}
  return ids | _READ | _FIXED.keys() | _UNUSED


def _check_vocabulary(file: File, values: dict[str, Any]) -> None:
  tokens, kinds = values.get("tokens"), values.get("token_type")
  template = file.metadata.get("tokenizer.chat_template", "")
  if not (_is_texts(tokens) and _is_texts(values.get("merges"))):
    problem = "has no list of tokens, or of merges"
  elif not isinstance(template, str):
    problem = "has a chat template that is no text"
  elif len(set(tokens)) < len(tokens):
    problem = "has a token twice"
  elif not isinstance(kinds, np.ndarray) or kinds.shape != (len(tokens),):
    problem = "has not one token_type for each token"
  elif others := set(kinds.tolist()) - {_NORMAL, _CONTROL, _ADDED, _EMPTY}:
    problem = f"has tokens of a type that is not known: {min(others)}"
  elif len(tokens) > file.tensors["token_embd.weight"].shape[0]:
    problem = "has more tokens than embeddings"
  else:
    return
  raise ValueError(f"{file.path}: its tokenizer {problem}: {_DIRECTORY}")


def _is_texts(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _ids(file: File, values: dict[str, Any]) -> dict[str, int]:
  """Returns the ids of special tokens, by their names in GGUF's keys."""
  ids = {name: values.get(f"{name}_token_id") for name in _IDS.split()}
  ids = {name: token for name, token in ids.items() if token is not None}
  for name, token in ids.items():
    if type(token) is not int or not 0 <= token < len(values["tokens"]):
      raise ValueError(
        f"{file.path} has {ID.format(name)}={token!r:.40}, which is no token"
      )
  return ids


def _backend(rule: _Rule, tokens: list[str], kinds: np.ndarray, merges) -> Any:
  """Returns the tokenizer, of the tokenizers library."""
  import tokenizers
  from tokenizers import decoders, models, normalizers, pre_tokenizers

  kinds = kinds.tolist()
  vocabulary = {
    token: i for i, token in enumerate(tokens) if kinds[i] != _EMPTY
  }
  pairs = [tuple(merge.split(" ")) for merge in merges]
  backend = tokenizers.Tokenizer(
    models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule.whole)
  )
  if rule.nfc:
    backend.normalizer = normalizers.NFC()
  cuts = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
  if rule.pattern:
    pattern = tokenizers.Regex(rule.pattern)
    cuts.append(pre_tokenizers.Split(pattern, behavior="isolated"))
  last = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=rule.pattern is None
  )
  backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
  backend.decoder = decoders.ByteLevel()
  backend.add_tokens(
    [
      tokenizers.AddedToken(
        token, special=kinds[i] == _CONTROL, normalized=False
      )
      for i, token in enumerate(tokens)
      if kinds[i] in (_CONTROL, _ADDED)
    ]
  )
  return backend


def _beginning(bos: str, tokens: list[str]) -> Any:
  """Returns what puts BOS before every text."""
  from tokenizers import processors

  return processors.TemplateProcessing(
    single=[bos, "$A"],
    pair=[bos, "$A", bos, "$B:1"],
    special_tokens=[(bos, tokens.index(bos))],
  )
