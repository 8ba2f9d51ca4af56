"""What stands in prompts and data is text, also where it looks like a control.

A tokenizer takes "<|im_end|>" for a control token wherever it stands. Templates
write such tokens; a prompt that holds these letters must not end its own turn.
So the contents are marked before they are set by a template: `mark` puts a name
that nobody can guess in the place of each control token. `encode` then reads
the tokens that are left in the text, which are the template's, as what they
are, and the letters in the marks' places as text.

Control tokens are the tokenizer's added tokens that are special, and others
that its chat template writes (the turns of DeepSeek's are not marked special),
but for tags such as <think> and </think>, which models write in their answers
and templates look for: these are one token in prompts as in completions.
"""

import functools
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

_TAG = re.compile(r"</?[a-z_]+>")


class Marks(NamedTuple):
  """What marks stand for, in the texts of one tokenizer.

  Attributes:
    tokens: the control tokens (tokenizers' AddedToken), the longest first.
    numbers: their places in `tokens`, by their text.
    found: finds them.
    heads: texts with which one of them begins.
    tails: texts with which one of them ends.
    nonce: begins every mark: private characters, drawn at random.
  """

  tokens: tuple[Any, ...]
  numbers: dict[str, int]
  found: re.Pattern
  heads: tuple[str, ...]
  tails: tuple[str, ...]
  nonce: str


@functools.lru_cache(maxsize=8)
def marks(tokenizer: Any) -> Marks:
  """The marks of a tokenizer's texts."""
  written = str(tokenizer.chat_template or "")
  tokens = [
    token
    for token in tokenizer.added_tokens_decoder.values()
    if token.special
    or (
      token.content in written
      and token.content.strip()
      and not _TAG.fullmatch(token.content)
    )
  ]
  tokens = tuple(sorted(tokens, key=lambda token: -len(token.content)))
  numbers = {token.content: k for k, token in enumerate(tokens)}
  words = [
    rf"(?<!\w){re.escape(t.content)}(?!\w)"
    if t.single_word
    else re.escape(t.content)
    for t in tokens
  ]
  nonce = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))
  parts = [(t[:i], t[i:]) for t in numbers for i in range(1, len(t))]
  heads, tails = (tuple(dict.fromkeys(p[end] for p in parts)) for end in (0, 1))
  found = re.compile("|".join(words) or "(?!)")
  return Marks(tokens, numbers, found, heads, tails, nonce)


def mark(tokenizer: Any, text: str) -> str:
  """The text, with marks in the place of all control tokens.

  Also at an end of the text that may become one beside a template's text, say
  "<|im_end|" before ">".
  """
  _, numbers, found, heads, tails, nonce = marks(tokenizer)
  marked = found.sub(lambda m: f"{nonce}{numbers[m[0]]};", text)
  # At whitespace it would keep templates from stripping that.
  if text.endswith(heads) and not text[-1].isspace():
    marked += f"{nonce};"
  if text.startswith(tails) and not text[0].isspace():
    marked = f"{nonce};{marked}"
  return marked


def keep(tokenizer: Any, text: str) -> str:
  """The text as it is: control tokens in it are what they look like."""
  del tokenizer
  return text


SPECIAL_TOKENS: dict[str, Callable[[Any, str], str]] = {
  "text": mark,
  "control": keep,
}
"""data.special_tokens: what control tokens in prompts and data become."""


def unmark(tokenizer: Any, marked: str) -> str:
  """The text that was marked."""
  tokens, nonce = marks(tokenizer).tokens, marks(tokenizer).nonce
  return re.sub(
    f"{nonce}([0-9]*);",
    lambda m: tokens[int(m[1])].content if m[1] else "",
    marked,
  )


def encode(
  tokenizer: Any, marked: str, add_special_tokens: bool = False
) -> list[int]:
  """The ids of a text: marks are text, all other control tokens are controls.

  Args:
    tokenizer: a transformers tokenizer.
    marked: from `mark`, or of a template that was given such texts.
    add_special_tokens: whether the tokenizer adds what it adds by itself.

  Raises:
    ValueError: the tokenizer has no way to write a control token as text.
  """
  if marks(tokenizer).nonce not in marked:
    return tokenizer.encode(marked, add_special_tokens=add_special_tokens)
  return encode_marked(tokenizer, marked, add_special_tokens)


def encode_marked(
  tokenizer: Any, marked: str, add_special_tokens: bool
) -> list[int]:
  """`encode`, for a text that has marks; gives the same ids for one without."""
  tokens, numbers, found, *_, nonce = marks(tokenizer)
  backend, ids = _with_aliases(tokenizer)
  controls = found.sub(lambda m: f"{nonce}{numbers[m[0]]}:", marked)
  text = unmark(tokenizer, controls)
  plain = backend.encode(text, add_special_tokens=False).ids
  inside = {int(k) for k in re.findall(f"{nonce}([0-9]+);", marked)}
  names = {tokens[k].content for k in inside} - {tokenizer.unk_token}
  if wrong := {tokenizer.convert_tokens_to_ids(n) for n in names} & {*plain}:
    raise ValueError(
      f"a prompt has {tokenizer.convert_ids_to_tokens(min(wrong))!r} in its"
      " text, and this tokenizer has no other way to write that than the"
      " control token: take it out, or set data.special_tokens = 'control'"
    )
  if add_special_tokens:
    plain = backend.encode(text, add_special_tokens=True).ids
  return [ids.get(i, i) for i in plain]


@functools.lru_cache(maxsize=2)
def _with_aliases(tokenizer: Any) -> tuple[Any, dict[int, int]]:
  """A copy of the tokenizer's backend in which only aliases are controls.

  The alias of control token k is NONCE k ":", with the same rules of whitespace
  around it; so one pass over the whole text does all that the original does.

  Returns:
    The copy, and from its aliases' ids to the original ones.
  """
  import tokenizers

  backend = getattr(tokenizer, "backend_tokenizer", None)
  if not isinstance(backend, tokenizers.Tokenizer):
    raise ValueError(
      f"{type(tokenizer).__name__} cannot write control tokens as text: set"
      " data.special_tokens = 'control'"
    )
  tokens, nonce = marks(tokenizer).tokens, marks(tokenizer).nonce
  copy = tokenizers.Tokenizer.from_str(backend.to_str())
  copy.no_truncation()
  copy.no_padding()
  copy.add_special_tokens(list(tokens))
  copy.encode_special_tokens = True  # reads special tokens as text
  ids = {}
  for k, token in enumerate(tokens):
    rules = {"lstrip": token.lstrip, "rstrip": token.rstrip}
    rules |= {"normalized": token.normalized, "special": False}
    alias = tokenizers.AddedToken(f"{nonce}{k}:", **rules)
    copy.add_tokens([alias])
    number = copy.token_to_id(alias.content)
    ids[number] = tokenizer.convert_tokens_to_ids(token.content)
  return copy, ids
