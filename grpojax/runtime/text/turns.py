r"""Encoding of the text between two turns of the model.

Sampled ids are never decoded and encoded again; only observations are encoded:

    prompt            <|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n
    sampled           3<|im_end|>
    encode("No", 2)   \n<|im_start|>user\nNo<|im_end|>\n<|im_start|>assistant\n
    sampled           2<|im_end|>

So the model sees its earlier thinking in training. When it is served, some chat
templates (Qwen 3's) remove it.
"""

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.runtime.text import special_tokens
from grpojax.runtime.text.chat_template import DATE, render_prompt
from grpojax.runtime.text.tokenization import (
  TEMPLATE,
  each_text,
  encode_text,
  is_template,
)

Observation = str | Sequence[Mapping[str, Any]]
MARK = " [...]"  # end of a shortened observation

_USERS = "Wqx 17?", "(vk)\n\nWhy not."  # in chats that test a template
_ANSWERS = "Zjq 23.", "[kz]\n\nNone"
_THINKING = re.compile(  # spaces and tags such as <think> at a text's end
  r"(?:\s|[<\[][^\s<>\[\]]*(?:think|thought|reason)[^\s<>\[\]]*[>\]])*\Z", re.I
)


def _with_contents(observation, texts):
  if isinstance(observation, str):
    return texts[0]
  pairs = zip(observation, texts, strict=False)  # drops messages without text
  return [{**message, "content": text} for message, text in pairs]


@dataclasses.dataclass(frozen=True, eq=False)
class TurnEncoder:
  """Encoder of observations: texts or, with a chat template, messages.

  `template` surrounds a text; in a chat, the result is a user's message. For
  `template_options` and `special_tokens` see `encode_prompt`.
  """

  tokenizer: Any
  eos_ids: Sequence[int]  # end a turn of the model
  _: dataclasses.KW_ONLY
  template: str = "\n{observation}\n"
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  special_tokens: str = "text"
  max_observation: int = 0  # limit of an observation's tokens; 0: none
  # Kinds of observations that `check` has accepted.
  checked: set[tuple] = dataclasses.field(default_factory=set, init=False)

  def __post_init__(self):
    if not is_template(self.template, "observation"):
      wrong = TEMPLATE.replace("prompt", "observation")
      raise ValueError(f"the observation template {self.template!r} {wrong}")
    if not self.tokenizer.chat_template and {*self.template_options} - {DATE}:
      raise ValueError(
        "template options need a chat template, which this tokenizer lacks: "
        f"leave {[*self.template_options]} out, or use an instruct model"
      )
    self.check("")

  def __call__(self, observation: Observation, last_id: int) -> list[int]:
    """Returns the ids between the end of a turn and the model's next answer.

    Omits the template's end token if the turn ended with it. Lone surrogates
    become "?". ValueError as in `check` and `encode_prompt`.
    """
    self.check(observation)
    plain = lambda text: text.encode("utf-8", "replace").decode()
    observation = self._cut(each_text(plain, observation))
    write = special_tokens.SPECIAL_TOKENS[self.special_tokens]
    marked = each_text(functools.partial(write, self.tokenizer), observation)
    text, tail = self._pieces(observation)[-1], self._pieces(marked)[-1]
    if special_tokens.unmark(self.tokenizer, tail) != text:
      raise ValueError(
        "the chat template does not treat the name of a special token as plain "
        f"text: leave it out of the observation {text[:200]!r}, or set "
        "data.special_tokens = 'control'"
      )
    ids = self._encode(tail)
    closes = self.tokenizer.chat_template and last_id in self.eos_ids
    return ids[1:] if closes and ids[0] == last_id else ids

  def check(self, observation: Observation) -> None:
    """Raises ValueError if an observation of this kind cannot follow a turn.

    Tests roles and keys but no contents, so that a run can check at its start.
    """
    is_text = isinstance(observation, str)
    chat = self.tokenizer.chat_template
    messages = [{"role": "", "content": ""}] if is_text else observation
    fields = [m.get(key) for m in messages for key in ("role", "content")]
    texts = [isinstance(field, str) for field in fields]
    if not texts or not all(texts) or not (is_text or chat):
      raise ValueError(
        "an observation must be a text or, with a chat template, messages whose"
        f" role and content are texts, not {str(observation)[:200]}"
      )
    kind = is_text, *((m["role"], *m) for m in messages)
    if not chat or kind in self.checked:
      return
    # Made-up contents, which are easy to find in the text of the chat.
    words = [f"kqj{i}x" for i in range(len(messages))]
    probe = _with_contents(observation, words)
    tail = self._pieces(probe)[-1]
    trouble = ""
    # Messages follow a single answer: a template can refuse more tool results.
    for user, answers in zip(_USERS, (_ANSWERS[1:], _ANSWERS), strict=True):
      answers = answers if is_text else answers[:1]
      whole = self._pieces(probe, user, answers)
      turns = self._pieces(probe, user, ()) + [tail] * len(answers)
      for text, turn in zip(whole, turns, strict=True):
        if _THINKING.sub("", text) != _THINKING.sub("", turn):
          trouble = f"writes {text!r} in place of {turn!r} in another chat:"
    # A turn may end in plain text, which then follows the sampled EOS.
    opening = tail.partition(words[0])[0]
    ends = special_tokens.marks(self.tokenizer).pattern.search(opening)
    ends = ends or {*self._encode(opening)} & {*self.eos_ids}
    if ends and self._encode(tail)[0] not in self.eos_ids:
      trouble = (
        f"must start {opening!r} after an answer with one of the EOS ids "
        f"{self.eos_ids}: complete eos_token_id in generation_config.json, or"
      )
    if any(tail.count(word) != 1 for word in words):
      trouble = f"must write an observation once, as it is, unlike {tail!r}:"
    if trouble:
      raise ValueError(
        f"the model's chat template {trouble} use one that appends to a chat"
      )
    self.checked.add(kind)

  def _pieces(self, observation, user=_USERS[0], answers=_ANSWERS[:1]):
    """Returns the texts of a chat before, between and after its answers."""
    if not self.tokenizer.chat_template:
      return [self.template.format(observation=observation)]
    if isinstance(observation, str):
      text = self.template.strip().format(observation=observation)
      observation = [{"role": "user", "content": text}]
    messages = [{"role": "user", "content": user}]
    for answer in answers:
      messages += [{"role": "assistant", "content": answer}, *observation]
    pieces = [
      render_prompt(self.tokenizer, messages, {**self.template_options})
    ]
    for answer in answers:  # first occurrence: observations may repeat it
      before, _, after = pieces.pop().partition(answer)
      pieces += [before, after]
    return pieces

  def _encode(self, tail):
    encode = functools.partial(special_tokens.encode, self.tokenizer)
    ids = encode((self.tokenizer.eos_token or "") + tail)
    return ids[1:] if ids[:1] == [self.tokenizer.eos_token_id] else encode(tail)

  def _cut(self, observation):
    """Shortens an observation to `max_observation` tokens, and adds `MARK`."""
    is_text = isinstance(observation, str)
    most = self.max_observation
    texts = [observation] if is_text else [m["content"] for m in observation]

    def first(size):  # the first `size` characters
      starts = itertools.accumulate(map(len, texts), initial=0)
      pairs = zip(texts, starts, strict=False)
      pieces = [text[: size - i] for text, i in pairs if i < size] or [""]
      return [*pieces[:-1], pieces[-1] + MARK]

    count = lambda t: len(encode_text(self.tokenizer, t, self.special_tokens))
    is_over = lambda texts: sum(map(count, texts)) > most
    size = sum(map(len, texts))
    # Assumes at most 64 characters per token, to save time on long texts.
    if not most or (size <= 64 * most and not is_over(texts)):
      return observation
    # Bisection finds the largest number of characters within the limit.
    sizes = range(min(size, 64 * most))
    size = bisect.bisect_left(sizes, True, key=lambda n: is_over(first(n))) - 1
    return _with_contents(observation, first(size))
