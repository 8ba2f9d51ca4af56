"""Tokenizers in Hugging Face format, loaded from local directories only."""

import functools
import itertools
import os
import pathlib
import string
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from grpojax.core.ends import Ends
from grpojax.models.config_json import text_part
from grpojax.models.huggingface import ASSETS, read_config
from grpojax.models.huggingface.weights import read_json
from grpojax.runtime.text import special_tokens as special_tokens_lib
from grpojax.runtime.text import trial
from grpojax.runtime.text.chat_template import DATE, render_prompt, whole_chat
from grpojax.runtime.text.special_tokens import SPECIAL_TOKENS

PAD, EOS, UNK = "<|pad|>", "<|endoftext|>", "<|unk|>"
SMALLEST_BPE = 256 + 2  # tokens: all bytes, PAD and EOS

# Alternating lines "Q: ..." and "A: ..."; a system message is a bare line.
CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\n"
  "{% elif message['role'] == 'assistant' %}A: {{ message['content'] }}\n"
  "{% else %}{{ message['content'] }}\n{% endif %}"
  "{% endfor %}"
  "{% if add_generation_prompt %}A: {% endif %}"
)


def import_transformers() -> types.ModuleType:
  """Returns the transformers library, which is slow to import."""
  # Suppresses the library's warning that models need PyTorch.
  advice = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
  with mock.patch.dict(os.environ, advice):
    import transformers

  return transformers


def load(path: str | os.PathLike) -> Any:
  """Loads a directory's transformers tokenizer, without network or remote code.

  ValueError if its files are missing or unreadable, exhaust time or memory, or
  do not fit the model in config.json.
  """
  path = pathlib.Path(path)
  names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
  present = [name for name in names if (path / name).is_file()]
  if not present:
    raise ValueError(
      f"no tokenizer in {path}: none of {', '.join(names)} is there. Download"
      " the model first, or copy its tokenizer files into that directory"
    )
  settings = path / "tokenizer_config.json"
  if settings.is_file():
    read_json(settings)  # raises ValueError unless it is an object
  transformers = import_transformers()
  # AutoTokenizer may rebuild a tokenizer.json with the class in
  # tokenizer_config.json, which changes ids: in transformers 5.0 to 5.15
  # byte-level tokenizers of the class LlamaTokenizerFast lose all spaces.
  is_json = present[0] == "tokenizer.json"
  name = "PreTrainedTokenizerFast" if is_json else "AutoTokenizer"
  try:
    tokenizer = getattr(transformers, name).from_pretrained(
      str(path), local_files_only=True, trust_remote_code=False
    )
  except Exception as error:  # transformers raises many types
    raise ValueError(f"cannot read the tokenizer in {path}: {error}") from error
  config = path / "config.json"
  size = config.is_file() and read_config(config).get("vocab_size")
  if type(size) is int:
    _check_size(path, tokenizer, size)
    tokenizer.embeddings = size  # for `special_tokens.encode`
  if ASSETS not in path.absolute().parents:  # not a bundled model
    file = path / "tokenizer.json"
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    trial.check(template, str(file), changed)
  return tokenizer


def _check_size(path: pathlib.Path, tokenizer: Any, size: int) -> None:
  """Raises ValueError if ids are >= `size`; for added tokens, only warns."""
  beyond = {i: x for x, i in tokenizer.get_vocab().items() if i >= size}
  used = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
  added = tokenizer.added_tokens_decoder.keys() - {*used}
  listed = ", ".join(f"{beyond[i]!r} ({i})" for i in sorted(beyond)[:3])
  problem = (
    f"the tokenizer in {path} has {len(beyond)} ids from {size} on ({listed}), "
    f"but the model has {size} embeddings"
  )
  if beyond.keys() - added:
    raise ValueError(f"{problem}: use the tokenizer of the same model")
  if beyond:
    print(f"warning: {problem}: texts with these tokens are refused")


def format_prompt(
  tokenizer: Any,
  prompt: str | Sequence[Mapping[str, Any]],  # text or chat messages
  template: str = "{prompt}",
  system_prompt: str = "",  # for messages without a system message
  template_options: Mapping[str, Any] | None = None,
) -> str:
  """Returns the text of a prompt, formatted by the chat template, if any.

  `template` surrounds a text prompt: "{prompt}" marks its place, and other
  braces are doubled. The result is the user's message in a chat, where blanks
  around `template` are removed. `template_options` are keyword arguments of the
  chat template, and "date_string". ValueError for unsupported options.
  """
  options = dict(template_options or {})
  if not tokenizer.chat_template:
    options.pop(DATE, None)
    if not isinstance(prompt, str) or system_prompt or options:
      raise ValueError(
        "data.system_prompt, data.template_options and prompts that are chats "
        "need a chat template, which this tokenizer lacks: use an instruct "
        "model, or only text prompts and data.template"
      )
    return _fill(template, prompt)
  if isinstance(prompt, str):
    text = _fill(template.strip(), prompt)
    messages = [{"role": "user", "content": text}]
  else:
    messages = [dict(message) for message in prompt]
  if system_prompt and messages[0]["role"] != "system":
    messages = [{"role": "system", "content": system_prompt}, *messages]
  return render_prompt(tokenizer, messages, options)


TEMPLATE = "must hold {prompt} and no other field; double any other braces"


def is_template(template: str, field: str = "prompt") -> bool:
  """Returns True if `field` is a template's only field: see `TEMPLATE`."""
  return fields(template) == {field}


def fields(template: str) -> set[str] | None:
  """Returns a template's field names, or None if one is not a plain {name}."""
  try:
    parts = [part[1:] for part in string.Formatter().parse(template)]
  except ValueError:
    return None
  named = [x for x in parts if x[0] is not None]
  plain = all(x[0].isidentifier() and x[1:] == ("", None) for x in named)
  return {x[0] for x in named} if plain else None


def _fill(template: str, prompt: str) -> str:
  if not is_template(template):
    raise ValueError(f"the prompt template {template!r} {TEMPLATE}")
  return template.format(prompt=prompt)


def encode_prompt(
  tokenizer: Any,
  prompt: str | Sequence[Mapping[str, Any]],
  template: str = "{prompt}",
  system_prompt: str = "",
  template_options: Mapping[str, Any] | None = None,
  special_tokens: str = "text",
) -> tuple[str, list[int]]:
  """Returns the text of a prompt (as from `format_prompt`) and its ids.

  A chat template writes special tokens such as BOS itself; without a template,
  the tokenizer adds them. `special_tokens` (a key of `SPECIAL_TOKENS`) sets how
  their names in prompts are read; ValueError if one cannot be read as text.
  """
  options = template_options
  text = format_prompt(tokenizer, prompt, template, system_prompt, options)
  marked = text
  write = functools.partial(SPECIAL_TOKENS[special_tokens], tokenizer)
  inner = each_text(write, prompt)
  system = write(system_prompt)
  if [inner, system] != [prompt, system_prompt]:
    marked = format_prompt(tokenizer, inner, template, system, options)
    if special_tokens_lib.unmark(tokenizer, marked) != text:
      raise ValueError(
        "the model's chat template does not treat the name of a special token"
        " as plain text: remove it from the prompt, or set"
        f" data.special_tokens = 'control'; the prompt is {text[:200]!r}"
      )
  if tokenizer.chat_template:
    return text, special_tokens_lib.encode(tokenizer, marked)
  return text, _encode_plain(tokenizer, marked)


def _encode_plain(tokenizer: Any, marked: str) -> list[int]:
  """Returns a prompt's ids, with the tokenizer's BOS and without EOS."""
  ids = special_tokens_lib.encode(tokenizer, marked, True)
  bare = special_tokens_lib.encode(tokenizer, marked)
  bos = tokenizer.bos_token_id
  eos = tokenizer.eos_token_id
  if ids[:2] == [bos, bos] and bare[:2] != ids[:2]:
    raise ValueError(
      f"a prompt begins with {tokenizer.bos_token!r} twice: remove it from "
      "data.template (or the prompt), because the tokenizer adds it"
    )
  return ids[:-1] if ids[-1:] == [eos] and ids[-len(bare) :] != bare else ids


def encode_text(
  tokenizer: Any, text: str, special_tokens: str = "text"
) -> list[int]:
  """Returns a text's ids without BOS; `special_tokens`: see `encode_prompt`."""
  marked = SPECIAL_TOKENS[special_tokens](tokenizer, text)
  return special_tokens_lib.encode(tokenizer, marked)


def encode_conversation(
  tokenizer: Any,
  sample: str | Sequence[Mapping[str, Any]],
  special_tokens: str = "text",
  date: str | None = None,
) -> list[int]:
  """Returns the ids of a text, or of a chat formatted by the chat template.

  `special_tokens`: see `encode_prompt`. `date` is today by default.
  """
  write = functools.partial(SPECIAL_TOKENS[special_tokens], tokenizer)
  marked = each_text(write, sample)
  is_text = isinstance(sample, str)
  if not is_text:
    marked = whole_chat(tokenizer, marked, date)
  return special_tokens_lib.encode(tokenizer, marked, is_text)


def each_text(write: Callable[[str], str], content: Any) -> Any:
  """Applies `write` to each text in nested dicts and lists."""
  if isinstance(content, str):
    return write(content)
  if isinstance(content, Mapping):
    return {key: each_text(write, value) for key, value in content.items()}
  if isinstance(content, (list, tuple)):
    return [each_text(write, value) for value in content]
  return content


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
  """Returns the text of token ids, with special tokens and all spaces."""
  return tokenizer.decode(
    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
  )


def decode_completion(
  tokenizer: Any, ids: np.ndarray, mask: np.ndarray, ends: Ends
) -> str:
  """Returns the text of a completion [T], up to its EOS or stop string.

  Keeps other special tokens, so that no reward reads "1<|pad|>94" as "194".
  """
  tokens = []
  stop = ends.stop
  state = 0
  before = 0
  for token in np.asarray(ids)[np.asarray(mask)].tolist():
    if token in ends.ids:
      break
    tokens.append(token)
    if stop:
      state = stop.table[state, stop.classes[token]]
      if state == len(stop.table):
        break
      # In state 0 no stop string has begun, so the text has all tokens so far.
      before = before if state else len(tokens)

  text = decode(tokenizer, tokens)
  if not stop or state < len(stop.table):
    return text
  # The text ends at the first stop string, which may start within a token.
  begins = [i for x in stop.strings if (i := text.find(x)) >= 0]
  # Decoding may change a stop string: its invalid bytes or a first space.
  return text[: min(begins)] if begins else decode(tokenizer, tokens[:before])


def character_tokenizer() -> Any:
  r"""Returns the bundled models' tokenizer of single characters.

  Its 100 tokens are <|pad|> = 0, <|endoftext|> = 1, <|unk|> = 2, then "\n",
  printable ASCII (32..126) and "\n\n", which can end a completion.
  """
  import tokenizers

  characters = ["\n", *map(chr, range(32, 127))]
  tokens = [PAD, EOS, UNK, *characters, "\n\n"]
  model = tokenizers.models.BPE(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=[("\n", "\n")],
    unk_token=UNK,
  )
  backend = tokenizers.Tokenizer(model)
  backend.decoder = tokenizers.decoders.Fuse()
  return _wrapped(backend, unk_token=UNK)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
  """Trains a tokenizer by byte-pair encoding (arXiv 1508.07909).

  Works on bytes like GPT-2, but never merges digits. Has `vocab_size` tokens,
  with <|pad|> = 0 and <|endoftext|> = 1, or fewer if no pairs are left.
  """
  if vocab_size < SMALLEST_BPE:
    raise ValueError(
      f"vocab_size = {vocab_size}: must be {SMALLEST_BPE} or more, for"
      " all bytes, padding and EOS"
    )
  texts = list(texts)
  if not any(texts):
    raise ValueError("no texts to train a tokenizer on")
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  backend = tokenizers.Tokenizer(models.BPE())
  digits = pre_tokenizers.Digits(individual_digits=True)
  level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[PAD, EOS],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  return _wrapped(backend)


def _wrapped(backend: Any, **special: str) -> Any:
  return import_transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token=PAD,
    eos_token=EOS,
    clean_up_tokenization_spaces=False,
    **special,
  )


def eos_ids(
  path: str | os.PathLike, tokenizer: Any, vocab_size: int | None = None
) -> tuple[int, ...]:
  """Returns the unique ids that end a completion, at least one.

  They are the `eos_token_id` (ids or texts) of `generation_config.json`, or
  else of `config.json`, and the tokenizer's EOS. ValueError if there are none,
  or if one is not below `vocab_size`.
  """
  ids: list[int] = []
  for name in ("generation_config.json", "config.json"):
    file = pathlib.Path(path) / name
    if not ids and file.is_file():
      named = text_part(read_json(file)).get("eos_token_id")
      for token in named if isinstance(named, list) else [named]:
        if named is not None:
          ids.append(_eos_id(token, tokenizer, vocab_size, file))
  if tokenizer.eos_token_id is not None:
    ids.append(int(tokenizer.eos_token_id))
  if not ids:
    raise ValueError(
      f"no end-of-sequence token in {path}: set eos_token_id in its"
      " generation_config.json, or eos_token in tokenizer_config.json"
    )
  return tuple(dict.fromkeys(ids))


def gaps(
  tokenizer: Any, vocab_size: int, eos_ids: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
  """Returns ranges [start, stop) of ids below `vocab_size` without a token.

  Most of them pad the vocabulary to a round size. EOS ids count as tokens.
  """
  known = {*tokenizer.get_vocab().values(), *eos_ids}
  # Gaps lie between consecutive ids; -1 and `vocab_size` are the borders.
  ids = [-1, *filter(known.__contains__, range(vocab_size)), vocab_size]
  return tuple((i + 1, j) for i, j in itertools.pairwise(ids) if j > i + 1)


def _eos_id(token, tokenizer, vocab_size, file) -> int:
  if isinstance(token, str):
    token = tokenizer.get_vocab().get(token, token)
  largest = float("inf") if vocab_size is None else vocab_size - 1
  is_id = isinstance(token, int) and not isinstance(token, bool)
  if not is_id or not 0 <= token <= largest:
    raise ValueError(
      f"{file}: eos_token_id = {token!r} must be a token's text, an id of"
      f" 0..{largest}, or a list of them: otherwise completions never end"
    )
  return token


def pad_id(tokenizer: Any) -> int:
  """Returns the id of the padding token, or of EOS if there is none."""
  for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
    if token is not None:
      return int(token)
  raise ValueError(
    "the tokenizer has neither a padding nor an end-of-sequence token: set"
    " pad_token in its tokenizer_config.json"
  )
