"""Tokenizers in Hugging Face format, from local directories only.

`transformers` is imported inside the functions: it is slow to import, and
nothing else needs it.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PAD, EOS, UNK = "<|pad|>", "<|endoftext|>", "<|unk|>"

# Q: and A: take turns; a system message, if any, stands on a line of its own.
CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\n"
  "{% elif message['role'] == 'assistant' %}A: {{ message['content'] }}\n"
  "{% else %}{{ message['content'] }}\n{% endif %}"
  "{% endfor %}"
  "{% if add_generation_prompt %}A: {% endif %}"
)


def load(path: str | os.PathLike) -> Any:
  """Loads the tokenizer of a model directory, without network or remote code.

  Args:
    path: a directory with `tokenizer.json` (or another vocabulary file that
      transformers knows) and `tokenizer_config.json`.

  Returns:
    A transformers tokenizer.

  Raises:
    ValueError: the directory or its tokenizer files are missing, or cannot be
      read.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise ValueError(
      f"no tokenizer: {path} is not a directory. Models are read from local"
      " directories in Hugging Face format; download the model first"
    )
  names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
  if not any((path / name).is_file() for name in names):
    raise ValueError(
      f"no tokenizer in {path}: none of {', '.join(names)} is there. Copy the"
      " tokenizer files of the model into it"
    )
  from transformers import AutoTokenizer, PreTrainedTokenizerFast

  # A generic class says that tokenizer.json is the whole tokenizer. For some
  # model types (qwen2) AutoTokenizer would put the family's own in its place.
  kind = _read_json(path / "tokenizer_config.json").get("tokenizer_class")
  generic = kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
  loader = PreTrainedTokenizerFast if generic else AutoTokenizer
  try:
    return loader.from_pretrained(
      str(path), local_files_only=True, trust_remote_code=False
    )
  except Exception as error:  # transformers raises many kinds
    raise ValueError(f"cannot read the tokenizer in {path}: {error}") from error


def eos_ids(path: str | os.PathLike, tokenizer: Any) -> tuple[int, ...]:
  """The ids that end a completion.

  Taken from the first of these that names any: `generation_config.json`,
  `config.json`, the tokenizer.

  Args:
    path: the model directory.
    tokenizer: its tokenizer.

  Returns:
    One or more ids, without repetition, in the order of the file.

  Raises:
    ValueError: none of the three names an id.
  """
  found = None
  for name in ("generation_config.json", "config.json"):
    if found is None or found == []:
      found = _read_json(pathlib.Path(path) / name).get("eos_token_id")
  if found is None or found == []:
    found = tokenizer.eos_token_id
  if found is None:
    raise ValueError(
      f"no end-of-sequence token in {path}: set eos_token_id in its"
      " generation_config.json, or eos_token in tokenizer_config.json"
    )
  ids = found if isinstance(found, list) else [found]
  return tuple(dict.fromkeys(map(int, ids)))


def pad_id(tokenizer: Any) -> int:
  """The id to pad with: the tokenizer's padding token, else its EOS.

  Raises:
    ValueError: the tokenizer has neither.
  """
  for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
    if found is not None:
      return int(found)
  raise ValueError(
    "the tokenizer has neither a padding nor an end-of-sequence token: set"
    " pad_token in its tokenizer_config.json"
  )


def format_prompt(
  tokenizer: Any,
  prompt: str | Sequence[dict[str, str]],
  template: str = "{prompt}",
) -> str:
  """A prompt as the text that the model continues.

  Args:
    tokenizer: where it has a chat template, that formats the prompt, which may
      be a list of messages; `template` is not used.
    prompt: text, or chat messages {"role": ..., "content": ...}.
    template: for a tokenizer without chat template: a text with "{prompt}" in
      the prompt's place.

  Returns:
    The text.

  Raises:
    ValueError: messages without a chat template, or no "{prompt}" in the
      template.
  """
  if tokenizer.chat_template:
    messages = prompt
    if isinstance(prompt, str):
      messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
      list(messages), tokenize=False, add_generation_prompt=True
    )
  if not isinstance(prompt, str):
    raise ValueError(
      "the prompt is a list of chat messages, but the tokenizer has no chat"
      " template: use an instruct model, or data whose prompts are text"
    )
  if "{prompt}" not in template:
    raise ValueError(f'no "{{prompt}}" in the prompt template {template!r}')
  return template.replace("{prompt}", prompt)


def encode_prompt(
  tokenizer: Any,
  prompt: str | Sequence[dict[str, str]],
  template: str = "{prompt}",
) -> tuple[str, list[int]]:
  """`format_prompt`, and the ids of its text.

  A chat template writes special tokens (BOS and others) itself; without one the
  tokenizer adds what it is configured to add.

  Returns:
    The text and its ids.
  """
  text = format_prompt(tokenizer, prompt, template)
  plain = not tokenizer.chat_template
  return text, tokenizer.encode(text, add_special_tokens=plain)


def decode_completion(
  tokenizer: Any, ids: np.ndarray, mask: np.ndarray, eos_ids: Sequence[int]
) -> str:
  """The text of one completion: what stands before its first EOS.

  Special tokens that do not end it stay visible ("<|pad|>"), so that no reward
  takes "1<|pad|>94" for "194".

  Args:
    tokenizer: as loaded.
    ids: completion ids, [T].
    mask: True on the completion's tokens, [T].
    eos_ids: the ids that end a completion.

  Returns:
    The text.
  """
  kept = []
  for token in np.asarray(ids)[np.asarray(mask)].tolist():
    if token in eos_ids:
      break
    kept.append(token)
  return tokenizer.decode(
    kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
  )


def character_tokenizer(*, chat: bool = False) -> Any:
  r"""A tokenizer of single characters, for the embedded models.

  Its 100 tokens: <|pad|> = 0, <|endoftext|> = 1, <|unk|> = 2, then "\n",
  printable ASCII (32..126) and "\n\n", the only token of two characters, which
  can end a completion in plain text. Decoding gives back the very text.

  Args:
    chat: with the chat template "Q: {content}\nA: ".

  Returns:
    A transformers tokenizer; `save_pretrained` writes its files.
  """
  import tokenizers
  from transformers import PreTrainedTokenizerFast

  characters = ["\n", *map(chr, range(32, 127))]
  tokens = [PAD, EOS, UNK, *characters, "\n\n"]
  model = tokenizers.models.BPE(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=[("\n", "\n")],
    unk_token=UNK,
  )
  backend = tokenizers.Tokenizer(model)
  backend.decoder = tokenizers.decoders.Fuse()
  tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token=PAD,
    eos_token=EOS,
    unk_token=UNK,
    clean_up_tokenization_spaces=False,
  )
  if chat:
    tokenizer.chat_template = CHAT_TEMPLATE
  return tokenizer


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """The content of a JSON file, {} where there is none."""
  return json.loads(path.read_text()) if path.is_file() else {}
