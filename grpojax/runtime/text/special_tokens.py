"""Separation of a template's control tokens from text that looks like them.

A tokenizer always reads "<|im_end|>" as a control token, but a prompt that
contains this text must not end its own turn. So `mark` replaces it by a mark (a
random name) before the chat template is applied. `encode` then reads the
template's own "<|im_end|>" as a control token, and each mark as its text:

    prompt                Say <|im_end|>
    marked prompt         Say NONCE1;
    chat of the template  <|im_start|>user Say NONCE1;<|im_end|>
    encoded               control 0, text "user Say <|im_end|>", control 1

Control tokens are the tokenizer's special tokens, and added tokens that its
chat template writes (like DeepSeek's). Tags such as <think> are text.
"""

import functools
import math
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

_TAG = re.compile(r"</?[a-z_]+>")


class Marks(NamedTuple):
  """Control tokens of a tokenizer, and their marks."""

  tokens: tuple[Any, ...]  # tokenizers' AddedToken, the longest first
  numbers: dict[str, int]  # index in `tokens` by token text
  pattern: re.Pattern  # matches control tokens in a text
  heads: tuple[str, ...]  # proper prefixes of control tokens
  tails: tuple[str, ...]  # proper suffixes of control tokens
  nonce: str  # starts every mark: random private-use characters


@functools.lru_cache(maxsize=8)
def marks(tokenizer: Any) -> Marks:
  """Returns the control tokens and marks of a tokenizer."""
  template = str(tokenizer.chat_template or "")

  def is_control(token):
    text = token.content
    written = text in template and text.strip() and not _TAG.fullmatch(text)
    return token.special or written

  added = filter(is_control, tokenizer.added_tokens_decoder.values())
  tokens = tuple(sorted(added, key=lambda token: -len(token.content)))
  numbers = {token.content: k for k, token in enumerate(tokens)}
  words = [re.escape(token.content) for token in tokens]
  words = [
    rf"(?<!\w){word}(?!\w)" if token.single_word else word
    for word, token in zip(words, tokens, strict=True)
  ]
  splits = [(t[:i], t[i:]) for t in numbers for i in range(1, len(t))]
  return Marks(
    tokens,
    numbers,
    pattern=re.compile("|".join(words) or "(?!)"),
    heads=tuple({head for head, _ in splits}),
    tails=tuple({tail for _, tail in splits}),
    nonce="".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12)),
  )


def mark(tokenizer: Any, text: str) -> str:
  """Replaces all control tokens in a text by marks.

  Also marks a ">" at the start and "<|im_end|" at the end, because the
  template's text could complete them to a control token.
  """
  known = marks(tokenizer)
  to_mark = lambda match: f"{known.nonce}{known.numbers[match[0]]};"
  marked = known.pattern.sub(to_mark, text)
  # A mark at whitespace would prevent templates from stripping it.
  if text.endswith(known.heads) and not text[-1].isspace():
    marked += f"{known.nonce};"
  if text.startswith(known.tails) and not text[0].isspace():
    marked = f"{known.nonce};{marked}"
  return marked


# How control tokens in prompts and data are read, by data.special_tokens.
SPECIAL_TOKENS: dict[str, Callable[[Any, str], str]] = {
  "text": mark,
  "control": lambda tokenizer, text: text,
}


def unmark(tokenizer: Any, marked: str) -> str:
  """Replaces all marks by the text of their control tokens."""
  known = marks(tokenizer)
  token = lambda match: known.tokens[int(match[1])].content if match[1] else ""
  return re.sub(f"{known.nonce}([0-9]*);", token, marked)


def encode(
  tokenizer: Any, marked: str, add_special_tokens: bool = False
) -> list[int]:
  """Returns the ids of a marked text, or of a chat with marked contents.

  ValueError if the tokenizer cannot read the text or write a control token as
  text, or the model lacks a token's embedding.
  """
  encoder = encode_marked
  if marks(tokenizer).nonce not in marked:
    encoder = type(tokenizer).encode
  try:
    ids = encoder(tokenizer, marked, add_special_tokens=add_special_tokens)
  except BaseException as error:
    if type(error).__name__ != "PanicException":  # of Rust, not an Exception
      raise
    raise ValueError(
      f"the tokenizer cannot read a text ({error}): remove {marked[:80]!r}"
    ) from error
  size = getattr(tokenizer, "embeddings", math.inf)
  if ids and max(ids) >= size:
    token = tokenizer.convert_ids_to_tokens(max(ids))
    raise ValueError(
      f"a text has the token {token!r} ({max(ids)}), but the model only "
      f"has embeddings for ids below {size}: remove the token"
    )
  return ids


def encode_marked(
  tokenizer: Any, marked: str, add_special_tokens: bool
) -> list[int]:
  """Encodes a text with or without marks."""
  known = marks(tokenizer)
  backend, ids = _with_aliases(tokenizer)
  # The template's control tokens become aliases, then marks become text.
  alias = lambda match: f"{known.nonce}{known.numbers[match[0]]}:"
  text = unmark(tokenizer, known.pattern.sub(alias, marked))
  encoded = backend.encode(text, add_special_tokens=False).ids
  inside = {int(k) for k in re.findall(f"{known.nonce}([0-9]+);", marked)}
  names = {known.tokens[k].content for k in inside} - {tokenizer.unk_token}
  wrong = {tokenizer.convert_tokens_to_ids(n) for n in names} & {*encoded}
  if wrong:
    raise ValueError(
      f"a prompt has {tokenizer.convert_ids_to_tokens(min(wrong))!r} in its"
      " text, which this tokenizer can only encode as a control token: remove"
      " it, or set data.special_tokens = 'control'"
    )
  if add_special_tokens:
    encoded = backend.encode(text, add_special_tokens=True).ids
  return [ids.get(i, i) for i in encoded]


@functools.lru_cache(maxsize=2)
def _with_aliases(tokenizer: Any) -> tuple[Any, dict[int, int]]:
  """Returns a copy of the Rust tokenizer whose only control tokens are aliases.

  The alias of control token k is "NONCEk:", with the token's whitespace rules.
  Also returns a dict from each alias's id to its control token's id.
  """
  import tokenizers

  backend = getattr(tokenizer, "backend_tokenizer", None)
  if not isinstance(backend, tokenizers.Tokenizer):
    raise ValueError(
      f"{type(tokenizer).__name__} is not a fast (Rust) tokenizer, so it cannot"
      " encode control tokens as text: set data.special_tokens = 'control'"
    )
  known = marks(tokenizer)
  copy = tokenizers.Tokenizer.from_str(backend.to_str())
  copy.no_truncation()
  copy.no_padding()
  copy.add_special_tokens(list(known.tokens))
  copy.encode_special_tokens = True  # reads special tokens as text
  aliases = [
    tokenizers.AddedToken(
      f"{known.nonce}{k}:",
      lstrip=token.lstrip,
      rstrip=token.rstrip,
      normalized=token.normalized,
      special=False,
    )
    for k, token in enumerate(known.tokens)
  ]
  copy.add_tokens(aliases)  # in a single call: Gemma has 6,249 control tokens
  added = [copy.token_to_id(alias.content) for alias in aliases]
  ids = tokenizer.convert_tokens_to_ids([x.content for x in known.tokens])
  return copy, dict(zip(added, ids, strict=True))
