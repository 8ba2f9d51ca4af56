"""The reward `exact_answer` on token ids, for use inside a compiled step."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.types import Rollout
from grpojax.data.examples import MARK
from grpojax.rewards.exact import spellings
from grpojax.runtime.text import tokenization

_UNICODE = 0x110000  # number of Unicode code points


def exact_answer_ids(
  tokenizer: Any, eos_ids: Sequence[int], max_answer_length: int = 16
) -> tuple[
  Callable[[dict[str, Any]], dict[str, np.ndarray]],
  Callable[[Rollout, dict[str, Any]], Float[Array, "B G"]],
]:
  """Builds `exact_answer` on token ids; returns functions `(target, reward)`.

  `target(example)` returns {"answer": int32 [2, A + 1]}, A = max_answer_length:
  its characters as code points + 1, padded with 0, once without and once with
  thousands separators. The jittable `reward(rollout, targets)` is 1.0 or 0.0.

  So that "####" in the text is "####" in the ids, "#" and each digit must be
  tokens. A token of several characters must be all whitespace, or contain no
  "#", digit or whitespace. ValueError for other tokenizers, and by `target` for
  answers that are too long or contain a token of several characters.
  """
  texts = _token_texts(tokenizer)
  codes = np.array([_code(i, text) for i, text in enumerate(texts)] + [0])
  codes = codes.astype(np.int32)  # ids out of range use the last entry
  characters = {text for text in texts if len(text) == 1}
  longer = [text for text in texts if len(text) > 1]

  def target(example: dict[str, Any]) -> dict[str, np.ndarray]:
    answer = np.zeros((2, max_answer_length + 1), np.int32)
    for row, text in enumerate(spellings(example["answer"])):
      fits = len(text) <= max_answer_length and set(text) <= characters
      if not fits or any(token in text for token in longer):
        raise ValueError(
          f"the answer {text!r} cannot be compared on ids: each character (at"
          f" most max_answer_length = {max_answer_length}) must be a token, and"
          " no longer token may occur in it; compare texts instead"
        )
      answer[row, : len(text)] = [_code(0, character) for character in text]
    return {"answer": answer}

  def reward(rollout: Rollout, targets: dict[str, Any]) -> Float[Array, "B G"]:
    ids = rollout.completion_ids
    ends = jnp.isin(ids, jnp.array(eos_ids, jnp.int32))
    ended = jnp.cumsum(ends, axis=-1) > 0
    written = jnp.asarray(codes)[jnp.clip(ids, 0, len(texts))]
    written = jnp.where(rollout.completion_mask & ~ended, written, 0)
    # Column A of an answer is 0, so that it differs from any longer text.
    tail, marked = _last_answer(written, max_answer_length + 1)
    same = (tail[..., None, :] == targets["answer"][:, None]).all(-1)
    has_text = tail[..., 0] != 0
    return (marked & has_text & same.any(-1)).astype(jnp.float32)

  return target, reward


def _last_answer(
  codes: Int[Array, "B G T"], width: int
) -> tuple[Int[Array, "B G width"], Bool[Array, "B G"]]:
  """Returns the stripped text after the last "####", and True if "####" occurs.

  The text is cut or padded to `width` codes; tokens without text have code 0.
  """
  size = codes.shape[-1]
  # Move tokens without text to the end.
  order = jnp.argsort(codes == 0, axis=-1, stable=True)
  codes = jnp.take_along_axis(codes, order, axis=-1)
  place = jnp.arange(size)

  sharp = jnp.pad(codes == _code(0, "#"), ((0, 0), (0, 0), (0, len(MARK))))
  shifted = [sharp[..., i : i + size] for i in range(len(MARK))]
  marks = jnp.all(jnp.stack(shifted), axis=0)
  mark = jnp.max(jnp.where(marks, place, -1), axis=-1, keepdims=True)
  # Codes of whitespace are negative.
  inside = (place >= mark + len(MARK)) & (codes > 0)
  first = jnp.min(jnp.where(inside, place, size), axis=-1, keepdims=True)
  last = jnp.max(jnp.where(inside, place, -1), axis=-1, keepdims=True)

  source = first + jnp.arange(width)
  tail = jnp.take_along_axis(codes, jnp.clip(source, 0, size - 1), axis=-1)
  return jnp.where(source <= last, tail, 0), mark[..., 0] >= 0


def _code(token: int, text: str) -> int:
  """Returns a token's code, negative for whitespace and 0 for empty text.

  The code of a single character is its code point + 1, for any token; the code
  of longer text is unique to the token.
  """
  if not text:
    return 0
  size = ord(text) + 1 if len(text) == 1 else _UNICODE + 1 + token
  return -size if text.isspace() else size


def _token_texts(tokenizer: Any) -> list[str]:
  """Returns each token's text; ValueError for an unfit tokenizer."""
  special = set(tokenizer.all_special_ids)
  texts = []
  ids = tokenizer.encode("#", add_special_tokens=False)
  if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
    raise _unfit('"#" is not one token')
  for token in range(max(tokenizer.get_vocab().values()) + 1):
    # Decoders may trim the ends of a text, so the token stands in the middle.
    around = tokenization.decode(tokenizer, [*ids, token, *ids])
    text = around[1:-1]
    if around != f"#{text}#" or "\ufffd" in text:
      raise _unfit(f"token {token} between two # is decoded as {around!r}")
    part = r"[#\s]" if token in special else r"[#\s\d]"
    if len(text) > 1 and not text.isspace() and re.search(part, text):
      raise _unfit(f"token {token} is {text!r}")
    texts.append(text)
  if missing := set("#0123456789") - set(texts):
    raise _unfit(f"no token is {min(missing)!r}")
  return texts


def _unfit(reason: str) -> ValueError:
  return ValueError(
    "exact_answer on ids needs # and digits as single-character tokens, but"
    f" {reason}: compare texts instead (reward.on_device = False)"
  )


ON_DEVICE = {"exact_answer": exact_answer_ids}
"""Builders of rewards on token ids, by the name of the same reward on text."""
