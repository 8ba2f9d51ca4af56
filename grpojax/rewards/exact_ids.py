"""The reward `exact_answer` on token ids, inside a compiled step: the same."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.types import Rollout
from grpojax.data.examples import MARK
from grpojax.rewards.exact import spellings

_UNICODE = 0x110000  # one more than the largest code point


def exact_answer_ids(
  tokenizer: Any, eos_ids: Sequence[int], max_answer_length: int = 16
) -> tuple[
  Callable[[dict[str, Any]], dict[str, np.ndarray]],
  Callable[[Rollout, dict[str, Any]], Float[Array, "B G"]],
]:
  """Builds `exact_answer` as jittable functions of ids, `(target, reward)`.

  `target(example) -> {"answer": int32 [2, A + 1]}` has both spellings of the
  answer as `_code`s, padded with zeros; A is `max_answer_length`, in characters
  with separators. `reward(rollout, targets) -> [B, G]` is 1.0 or 0.0.

  The tokens must be characters, so that "####" in the text is "####" in the
  ids; longer ones must be whitespace only, or without digits, "#" and
  whitespace. ValueError for other tokenizers; from `target`, for an answer that
  is too long, or whose ids would be ambiguous.
  """
  texts = _token_texts(tokenizer)
  codes = np.array([_code(i, text) for i, text in enumerate(texts)] + [0])
  codes = codes.astype(np.int32)  # the last one stands for ids out of range
  characters = {text for text in texts if len(text) == 1}
  longer = [text for text in texts if len(text) > 1]

  def target(example: dict[str, Any]) -> dict[str, np.ndarray]:
    answer = np.zeros((2, max_answer_length + 1), np.int32)
    for row, text in enumerate(spellings(example["answer"])):
      fits = len(text) <= max_answer_length and set(text) <= characters
      if not fits or any(token in text for token in longer):
        raise ValueError(
          f"the answer {text!r} cannot be compared in ids, which needs at most"
          f" max_answer_length = {max_answer_length} characters, each a token"
          " of its own and no longer token among them: use the reward on text"
          " (exact_answer)"
        )
      answer[row, : len(text)] = [_code(0, character) for character in text]
    return {"answer": answer}

  def reward(rollout: Rollout, targets: dict[str, Any]) -> Float[Array, "B G"]:
    ids = rollout.completion_ids
    ends = jnp.isin(ids, jnp.array(eos_ids, jnp.int32))
    ended = jnp.cumsum(ends, axis=-1) > 0
    written = jnp.asarray(codes)[jnp.clip(ids, 0, len(texts))]
    written = jnp.where(rollout.completion_mask & ~ended, written, 0)
    # One more than the longest answer: a text that goes on differs there.
    tail, marked = _last_answer(written, max_answer_length + 1)
    same = (tail[..., None, :] == targets["answer"][:, None]).all(-1)
    has_text = tail[..., 0] != 0
    return (marked & has_text & same.any(-1)).astype(jnp.float32)

  return target, reward


def _last_answer(
  codes: Int[Array, "B G T"], width: int
) -> tuple[Int[Array, "B G width"], Bool[Array, "B G"]]:
  """Finds the stripped text after the last "####", and whether there is one.

  A longer text is cut to `width` codes; 0 stands for tokens without text.
  """
  size = codes.shape[-1]
  # Text first, in its order; what writes nothing last.
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
  """A number for the text of a token, negative for whitespace.

  0 without text; for one character its code point + 1, whichever token it is;
  for longer text a number of the token's own.
  """
  if not text:
    return 0
  size = ord(text) + 1 if len(text) == 1 else _UNICODE + 1 + token
  return -size if text.isspace() else size


def _token_texts(tokenizer: Any) -> list[str]:
  """Text of each token in the middle of others; ValueError if unfit."""
  special = set(tokenizer.all_special_ids)
  texts = []
  ids = tokenizer.encode("#", add_special_tokens=False)
  if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
    raise _unfit('"#" is not one token')
  for token in range(max(tokenizer.get_vocab().values()) + 1):
    # Between two others, so that no decoder trims it as a text's first or last.
    around = tokenizer.decode(
      [*ids, token, *ids],
      skip_special_tokens=False,
      clean_up_tokenization_spaces=False,
    )
    text = around[1:-1]
    if around != f"#{text}#" or "\ufffd" in text:
      raise _unfit(f"token {token} writes {around!r} in #...#")
    mixed = any(
      c == "#" or c.isspace() or (c.isdigit() and token not in special)
      for c in text
    )
    if len(text) > 1 and not text.isspace() and mixed:
      raise _unfit(f"token {token} writes {text!r}")
    texts.append(text)
  if missing := set("#0123456789") - set(texts):
    raise _unfit(f"no token writes {min(missing)!r}")
  return texts


def _unfit(reason: str) -> ValueError:
  return ValueError(
    "an exact-answer reward on ids needs a tokenizer of single characters, but"
    f" {reason}; use the reward on text (exact_answer) with this tokenizer"
  )


ON_DEVICE = {"exact_answer": exact_answer_ids}
"""Rewards that exist on token ids, by the name of the same reward on text:
`(tokenizer, eos_ids) -> (target, reward)`, as `exact_answer_ids`."""
