"""Tokenizers in Hugging Face format, from local directories only.

`transformers` is imported inside the functions: it is slow to import, and
nothing else needs it.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.models.weights import read_json
from grpojax.runtime import quiet_imports
from grpojax.runtime import special_tokens as special_tokens_lib
from grpojax.runtime.chat_template import DATE, set_messages, whole_chat
from grpojax.runtime.chat_template import asks_for_date as asks_for_date
from grpojax.runtime.chat_template import today as today
from grpojax.runtime.special_tokens import SPECIAL_TOKENS

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
  transformers = quiet_imports.transformers()
  # A generic class says that tokenizer.json is the whole tokenizer. For some
  # model types (qwen2) AutoTokenizer would put the family's own in its place.
  settings = path / "tokenizer_config.json"
  kind = settings.is_file() and read_json(settings).get("tokenizer_class")
  generic = kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
  name = "PreTrainedTokenizerFast" if generic else "AutoTokenizer"
  try:
    return getattr(transformers, name).from_pretrained(
      str(path), local_files_only=True, trust_remote_code=False
    )
  except Exception as error:  # transformers raises many kinds
    raise ValueError(f"cannot read the tokenizer in {path}: {error}") from error


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
    template_options: keywords of the chat template (enable_thinking, say), and
      "date_string", the date that it is to write (see `chat_template`).

  Returns:
    The text.

  Raises:
    ValueError: messages, a system prompt or options without a chat template, or
      what the chat template does not take.
  """
  options = dict(template_options or {})
  if not tokenizer.chat_template:
    options.pop(DATE, None)  # there is nobody who would write one
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
  if isinstance(prompt, str):
    text = _fill(template.strip(), prompt)
    messages = [{"role": "user", "content": text}]
  else:
    messages = [dict(message) for message in prompt]
  if system_prompt and messages[0]["role"] != "system":
    messages = [{"role": "system", "content": system_prompt}, *messages]
  return set_messages(tokenizer, messages, options)


def _fill(template: str, prompt: str) -> str:
  if "{prompt}" not in template:
    raise ValueError(f'no "{{prompt}}" in the prompt template {template!r}')
  return template.format(prompt=prompt)


def encode_prompt(
  tokenizer: Any,
  prompt: str | Sequence[Mapping[str, Any]],
  template: str = "{prompt}",
  system_prompt: str = "",
  template_options: Mapping[str, Any] | None = None,
  special_tokens: str = "text",
) -> tuple[str, list[int]]:
  """`format_prompt`, and the ids of its text.

  A chat template writes special tokens (BOS and others) itself; without one the
  tokenizer adds what it is configured to add.

  Args:
    tokenizer: see `format_prompt`, as for the arguments that follow.
    prompt: likewise.
    template: likewise.
    system_prompt: likewise.
    template_options: likewise.
    special_tokens: what the names of special tokens in the prompt, the messages
      and the system prompt are: a key of `SPECIAL_TOKENS`. In templates (the
      chat template, and `template`) they always are special tokens.

  Returns:
    The text as written, and its ids.

  Raises:
    ValueError: as `format_prompt`; or special tokens in the prompt that cannot
      be written as text.
  """

  def written(*contents):
    return format_prompt(
      tokenizer, contents[0], template, contents[1], template_options
    )

  text = marked = written(prompt, system_prompt)
  write = functools.partial(SPECIAL_TOKENS[special_tokens], tokenizer)
  contents = [_each_text(write, prompt), write(system_prompt)]
  if contents != [prompt, system_prompt]:
    marked = written(*contents)
    if special_tokens_lib.unmark(tokenizer, marked) != text:
      raise ValueError(
        "the model's chat template writes another text where a prompt has the"
        " name of a special token in it: take it out, or set"
        f" data.special_tokens = 'control'; the prompt is {text[:200]!r}"
      )
  plain = not tokenizer.chat_template
  return text, special_tokens_lib.encode(tokenizer, marked, plain)


def encode_text(
  tokenizer: Any, text: str, special_tokens: str = "text", **options: Any
) -> list[int]:
  """The ids of a text that no template has set.

  Args:
    tokenizer: a transformers tokenizer.
    text: the text.
    special_tokens: see `encode_prompt`.
    **options: add_special_tokens, False by default.
  """
  marked = SPECIAL_TOKENS[special_tokens](tokenizer, text)
  return special_tokens_lib.encode(tokenizer, marked, **options)


def encode_conversation(
  tokenizer: Any,
  sample: str | Sequence[Mapping[str, Any]],
  special_tokens: str = "text",
  date: str | None = None,
) -> list[int]:
  """The ids of a text, or of a whole chat by the tokenizer's own template.

  A template writes its special tokens itself; to a text the tokenizer adds
  those that it always adds.

  Args:
    tokenizer: a transformers tokenizer.
    sample: the text or the chat, with its answer.
    special_tokens: see `encode_prompt`.
    date: that the template is to write; None is today.
  """
  if isinstance(sample, str):
    return encode_text(
      tokenizer, sample, special_tokens, add_special_tokens=True
    )
  write = functools.partial(SPECIAL_TOKENS[special_tokens], tokenizer)
  marked = whole_chat(tokenizer, _each_text(write, sample), date)
  return special_tokens_lib.encode(tokenizer, marked)


def _each_text(write: Callable[[str], str], content: Any) -> Any:
  """A prompt, with each text in it written by `write`."""
  if isinstance(content, str):
    return write(content)
  if isinstance(content, Mapping):
    return {key: _each_text(write, value) for key, value in content.items()}
  if isinstance(content, (list, tuple)):
    return [_each_text(write, value) for value in content]
  return content


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

  characters = ["\n", *map(chr, range(32, 127))]
  tokens = [PAD, EOS, UNK, *characters, "\n\n"]
  model = tokenizers.models.BPE(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=[("\n", "\n")],
    unk_token=UNK,
  )
  backend = tokenizers.Tokenizer(model)
  backend.decoder = tokenizers.decoders.Fuse()
  tokenizer = quiet_imports.transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token=PAD,
    eos_token=EOS,
    unk_token=UNK,
    clean_up_tokenization_spaces=False,
  )
  if chat:
    tokenizer.chat_template = CHAT_TEMPLATE
  return tokenizer
