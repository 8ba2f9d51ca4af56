"""What an example is: the one thing that data sets, prompts and rewards share.

An example is a dict of JSON values with

    "prompt"    a text, or a list of chat messages {"role": ..., "content": ...}
                of which the last is not the assistant's
    "answer"    the reference answer, a text; not in data without answers
    "solution"  optional: a text to learn from, which ends with the answer

and whatever else the data set has: rewards get all of it. A solution says its
answer as GSM8K's do, after `MARK`. In a mixture of data sets `SOURCE` is the
name of the one that an example is of.
"""

SPLITS = ("train", "test")
SOURCE = "data_source"  # as in verl, so that its reward functions find it
MARK = "####"  # what follows the last one is the answer


def check_split(split: str) -> None:
  """Raises ValueError where there is no such split."""
  if split not in SPLITS:
    raise ValueError(f"unknown split {split!r}: choose one of {SPLITS}")
