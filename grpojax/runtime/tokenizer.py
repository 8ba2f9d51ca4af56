"""Tokenizers in Hugging Face format, from local directories only.

`transformers` is imported inside the functions: it is slow to import, and
nothing else needs it.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.models.weights import read_json

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

  Those of `generation_config.json`, or of `config.json` if it names none; and
  the tokenizer's, which ends a turn of a chat.

  Args:
    path: the model directory.
    tokenizer: its tokenizer.

  Returns:
    One or more ids, without repetition; the file's, in their order, come first.

  Raises:
    ValueError: none of the three names an id.
  """
  named = None
  for name in ("generation_config.json", "config.json"):
    if named is None or named == []:
      named = _read_json(pathlib.Path(path) / name).get("eos_token_id")
  ids = list(named) if isinstance(named, list) else [named]
  ids = [i for i in (*ids, tokenizer.eos_token_id) if i is not None]
  if not ids:
    raise ValueError(
      f"no end-of-sequence token in {path}: set eos_token_id in its"
      " generation_config.json, or eos_token in tokenizer_config.json"
    )
  return tuple(dict.fromkeys(map(int, ids)))


def pad_id(tokenizer: Any) -> int:
  """The id to pad with: the tokenizer's padding token, else its EOS.

  Raises:
    ValueError: the tokenizer has neither.
  """
  for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
    if token is not None:
      return int(token)
  raise ValueError(
    "the tokenizer has neither a padding nor an end-of-sequence token: set"
    " pad_token in its tokenizer_config.json"
  )


def format_prompt(
  tokenizer: Any,
  prompt: str | Sequence[Mapping[str, Any]],
  template: str = "{prompt}",
  system_prompt: str = "",
  template_options: Mapping[str, Any] | None = None,
) -> str:
  """A prompt as the text that the model continues.

  Args:
    tokenizer: where it has a chat template, that sets the messages.
    prompt: text, or chat messages {"role": ..., "content": ...}.
    template: what a prompt that is a text becomes: a text with "{prompt}" in
      the prompt's place, and other braces doubled. In a chat that is the user's
      message, and blanks at its ends are dropped: the chat template separates
      messages.
    system_prompt: the system's message before messages that have none. Where
      the chat template has no system role, it goes before the first message's
      text with a blank line between, as Gemma 3's template does it.
    template_options: keywords of the chat template (enable_thinking, say).

  Returns:
    The text.

  Raises:
    ValueError: messages, a system prompt or options without a chat template, or
      what the chat template does not take.
  """
  options = dict(template_options or {})
  if not tokenizer.chat_template:
    for what, value in (
      ("the prompt is a list of chat messages", not isinstance(prompt, str)),
      ("data.system_prompt is set", system_prompt),
      ("data.template_options are set", options),
    ):
      if value:
        raise ValueError(
          f"{what}, but the tokenizer has no chat template: use an instruct "
          "model, or text prompts and data.template alone"
        )
    return _fill(template, prompt)
  unknown = [n for n in options if n not in str(tokenizer.chat_template)]
  if unknown:
    raise ValueError(
      f"data.template_options: the model's chat template has no {unknown}"
    )
  if isinstance(prompt, str):
    text = _fill(template.strip(), prompt)
    messages = [{"role": "user", "content": text}]
  else:
    messages = [dict(message) for message in prompt]
  if system_prompt and messages[0]["role"] != "system":
    messages = [{"role": "system", "content": system_prompt}, *messages]
  return _chat(tokenizer, messages, options)


def _fill(template: str, prompt: str) -> str:
  if "{prompt}" not in template:
    raise ValueError(f'no "{{prompt}}" in the prompt template {template!r}')
  return template.format(prompt=prompt)


def _chat(
  tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]
) -> str:
  """Messages as text, set by the tokenizer's (sandboxed) chat template."""
  import jinja2

  def apply(messages):
    return tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True, **options
    )

  has_system = messages[0]["role"] == "system" and len(messages) > 1
  try:
    try:
      text = apply(messages)
      refused = has_system and messages[0]["content"].strip() not in text
    except jinja2.TemplateError:
      refused = has_system
      if not refused:
        raise
    if refused:  # by an error or, worse, by leaving it out
      system, first, *rest = messages
      content = f"{system['content'].strip()}\n\n{first['content']}"
      text = apply([first | {"content": content}, *rest])
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(
      f"the model's chat template does not take this prompt ({error}); roles: "
      f"{[message['role'] for message in messages]}"
    ) from error
  return text


def encode_prompt(
  tokenizer: Any,
  prompt: str | Sequence[Mapping[str, Any]],
  template: str = "{prompt}",
  system_prompt: str = "",
  template_options: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
  """`format_prompt`, and the ids of its text.

  A chat template writes special tokens (BOS and others) itself; without one the
  tokenizer adds what it is configured to add.

  Returns:
    The text and its ids.
  """
  text = format_prompt(
    tokenizer, prompt, template, system_prompt, template_options
  )
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
  return read_json(path) if path.is_file() else {}
