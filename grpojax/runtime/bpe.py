"""A byte-level BPE tokenizer, trained on texts of yours.

Byte-pair encoding of Sennrich et al. (arXiv 1508.07909), on bytes as in GPT-2.
"""

from collections.abc import Iterable
from typing import Any

from grpojax.runtime import quiet_imports
from grpojax.runtime.tokenizer import CHAT_TEMPLATE, EOS, PAD

SPECIAL = (PAD, EOS)
SMALLEST = 256 + len(SPECIAL)  # every byte is a token


def train_bpe(
  texts: Iterable[str], vocab_size: int, *, chat: bool = True
) -> Any:
  r"""Trains a tokenizer whose tokens are frequent pieces of words.

  All bytes are tokens, so any text can be written, and decoding gives back the
  very text. Digits are never merged: a number is written digit by digit. The
  same texts in the same order give the same tokenizer.

  Args:
    texts: what to learn from.
    vocab_size: tokens at most, with <|pad|> = 0 and <|endoftext|> = 1; fewer
      where the texts have no more pairs to merge.
    chat: with the chat template "Q: {content}\nA: ".

  Returns:
    A transformers tokenizer; `save_pretrained` writes its files.

  Raises:
    ValueError: vocab_size is too small for all bytes, or there is no text.
  """
  if vocab_size < SMALLEST:
    raise ValueError(
      f"vocab_size = {vocab_size}: must be {SMALLEST} or more, for all bytes"
    )
  texts = list(texts)
  if not any(texts):
    raise ValueError("no texts to train a tokenizer on")
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(SPECIAL),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  tokenizer = quiet_imports.transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token=PAD,
    eos_token=EOS,
    clean_up_tokenization_spaces=False,
  )
  if chat:
    tokenizer.chat_template = CHAT_TEMPLATE
  return tokenizer
