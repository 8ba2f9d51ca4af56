"""Training and held-out examples, without prompts that are too long.

A run reads all examples of a finite data set when it starts or resumes, to find
overlong prompts and changed data before it trains.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from grpojax.data import datasets, pipeline
from grpojax.data.drawn import ENDLESS
from grpojax.data.examples import prompt_key
from grpojax.data.pipeline import Mixture, Part
from grpojax.models import huggingface as hf
from grpojax.runtime.files import records
from grpojax.training.data import prompts
from grpojax.training.files import run_directory, sources
from grpojax.training.policies import Policy
from grpojax.training.settings import batches, mixtures
from grpojax.training.settings.run import TrainSettings

MEASURED = 4096
"""Maximum number of prompts of an endless data set measured at the start."""

FINGERPRINTED = 256
"""Number of examples in the fingerprint of an endless data set."""

_REPORT_EVERY = 10.0  # seconds between progress lines while reading


class Split(NamedTuple):
  """Examples of a split, without prompts that are too long."""

  examples: Any  # with random access
  dropped: int = 0  # number of examples left out
  fingerprint: str = ""  # SHA-256 of all examples' JSON, in order
  # Tokens per prompt; in an endless data set only of the first prompts.
  lengths: Int[np.ndarray, "n"] | None = None
  # Hash of each prompt's text; empty for an endless data set.
  prompts: Int[np.ndarray, "n"] = np.empty(0, np.int64)
  key: str = ""  # hash of all inputs from which lengths are computed
  parts: Mapping[str, Any] = {}  # splits of a mixture's data sets by name


def longest_prompt(*splits: Split) -> int:
  """Returns the number of tokens of the longest prompt.

  Only a part of an endless data set is measured, so the length is rounded up to
  a power of 2, at least 32.
  """
  longest = max(int(split.lengths.max(initial=1)) for split in splits)
  if any(len(split.examples) >= ENDLESS for split in splits):
    longest = max(32, 2 ** (longest - 1).bit_length())
  return longest


def load_examples(settings: TrainSettings, split: str) -> Any:
  """Loads all examples of a split, with random access.

  "train" depends on the run's seed; "test" has the first `eval.num_prompts`
  examples of the data set, or of each data set in a mixture.
  """
  data = settings.data
  parts = []
  selection = {"size": settings.eval.num_prompts}
  if split == "train":
    selection = {"seed": settings.seed}

  def load(name, path, options):
    options = sources.data_options(settings, name, path, options)
    return datasets.load(name, split, path, options, **selection)

  for name, source in mixtures.sources(settings).items():
    try:
      loaded = load(source.name, source.path, source.options)
    except ValueError as error:
      part = f"--config.{mixtures.SECTION}.{name}"
      why = str(error).replace("--config.data.", f"{part}.")
      raise ValueError(f"{part}: {why}") from error
    parts.append(Part(name, source.weight, loaded))
  if parts:
    return Mixture(parts)
  return load(data.name, data.path, data.options)


def load_split(
  settings: TrainSettings,
  policy: Policy,
  split: str,
  cache: pathlib.Path | None = None,
  check_signals: Callable[[], None] = lambda: None,
  examples: Any = None,
) -> Split:
  """Returns a split without the prompts longer than data.max_prompt_length.

  ValueError if there are such prompts, unless data.too_long = "drop". Lengths
  come from `cache`, a file of `save_lengths`, or else from the tokenizer.
  `check_signals` is called per example; `examples` default to `load_examples`.
  """
  fit = functools.partial(_fit, settings, policy, cache, check_signals)
  if examples is None:
    examples = load_examples(settings, split)
  if not isinstance(examples, Mixture):
    return fit(examples, split)
  parts = {p.name: fit(p.examples, f"{split} {p.name}") for p in examples.parts}
  fitting = [
    p._replace(examples=parts[p.name].examples) for p in examples.parts
  ]
  prints = {name: part.fingerprint for name, part in parts.items()}
  return Split(
    Mixture(fitting),
    sum(part.dropped for part in parts.values()),
    hashlib.sha256(json.dumps(prints).encode()).hexdigest(),
    np.concatenate([part.lengths for part in parts.values()]),
    np.concatenate([part.prompts for part in parts.values()]),
    parts=parts,
  )


def _fit(
  settings: TrainSettings,
  policy: Policy,
  cache: pathlib.Path | None,
  check_signals: Callable[[], None],
  examples: Any,
  name: str,
) -> Split:
  limit = settings.data.max_prompt_length or math.inf
  endless = len(examples) >= ENDLESS
  # Measure the prompts, unless this was done for the same inputs.
  printed, texts = fingerprint(examples, check_signals)
  key = f"{printed} {_digest(settings, policy)}"
  lengths = None if endless else _saved_lengths(cache, name, key)
  if lengths is None:
    most = min(_prompts_of_run(settings), MEASURED) if endless else ENDLESS
    encode = prompts.encoder(settings, policy)
    lengths = prompt_lengths(examples, encode, most, check_signals)
  whole = Split(examples, 0, printed, lengths, texts, key)
  # Refuse or drop prompts that are too long.
  too_long = lengths > limit
  remedy = "raise it"
  if too_long.any() and cache and run_directory.has_begun(cache.parent):
    remedy = "restore the data, because a run cannot change its limit"
  if settings.data.too_long == "refuse":
    if too_long.any():
      longest = int(np.argmax(lengths))
      raise ValueError(
        f"{name} split: {too_long.sum()} of {len(lengths)} prompts have more "
        f"than --config.data.max_prompt_length = {limit} tokens (example "
        f"{longest} has {lengths[longest]}), and prompts are never cut off: "
        f"{remedy}, or set data.too_long = 'drop'"
      )
    return whole
  if endless:
    raise ValueError(
      f"{name} split: data.too_long = 'drop' must read all examples, but this "
      "data set is endless: use 'refuse'"
    )
  if too_long.all():
    raise ValueError(
      f"{name} split: all {len(lengths)} prompts are longer than "
      f"--config.data.max_prompt_length = {limit} tokens: {remedy}"
    )
  short = pipeline.Subset(examples, np.flatnonzero(~too_long))
  texts = texts[~too_long]
  dropped = int(too_long.sum())
  return whole._replace(examples=short, dropped=dropped, prompts=texts)


def fingerprint(
  examples: Any, check_signals: Callable[[], None]
) -> tuple[str, Int[np.ndarray, "n"]]:
  """Returns a hash of all examples, and a hash of each prompt's text."""
  endless = len(examples) >= ENDLESS
  digest = hashlib.sha256()
  count = FINGERPRINTED if endless else len(examples)
  texts = np.empty(count, np.int64)
  for i in _with_progress(count, "read", check_signals):
    example = examples[i]
    text = json.dumps(example, sort_keys=True, default=str)
    digest.update(text.encode() + b"\n")
    texts[i] = hash(prompt_key(example["prompt"]))
  return digest.hexdigest(), texts[:0] if endless else texts


def in_training(train: Split, held_out: Split) -> int:
  """Returns the number of held-out prompts that are also training prompts."""
  return int(np.isin(held_out.prompts, train.prompts).sum())


def prompt_lengths(
  examples: Any,
  encode: pipeline.Encode,
  most: int,
  check_signals: Callable[[], None],
) -> Int[np.ndarray, "n"]:
  """Returns token counts of the first `most` prompts, or of all if fewer."""
  lengths = np.empty(min(len(examples), most), np.int32)
  for i in _with_progress(len(lengths), "measured", check_signals):
    prompt = examples[i]["prompt"]
    lengths[i] = len(encode(prompt)[1])
    if not lengths[i]:
      raise ValueError(
        f"example {i}: the prompt {prompt!r} has no tokens: remove it"
      )
  return lengths


def _with_progress(
  count: int, verb: str, check_signals: Callable[[], None]
) -> Iterator[int]:
  """Yields 0, 1, ..., count - 1, and prints progress lines."""
  last = time.monotonic()
  for i in range(count):
    check_signals()
    if time.monotonic() - last > _REPORT_EVERY:
      last = time.monotonic()
      print(f"{verb} {i} of {count} prompts", flush=True)
    yield i


def _prompts_of_run(settings: TrainSettings) -> int:
  """Returns the maximum number of prompts that a run can draw."""
  draws = settings.steps
  if settings.filter_groups.enable:
    draws *= settings.filter_groups.max_num_gen_batches
  smallest = min(batches.group_sizes(settings))
  return draws * (batches.samples_per_step(settings) // smallest)


def _digest(settings: TrainSettings, policy: Policy) -> str:
  """Hashes the tokenizer and prompt format, which determine the lengths."""
  digest = hashlib.sha256()
  for name in hf.COMPANIONS:
    file = policy.files.directory / name
    digest.update(file.read_bytes() if file.is_file() else b"")
  data = dataclasses.asdict(settings.data)
  for limit in ("max_prompt_length", "too_long"):
    del data[limit]
  digest.update(json.dumps(data, sort_keys=True, default=str).encode())
  return digest.hexdigest()


def save_lengths(file: pathlib.Path, splits: Mapping[str, Split]) -> None:
  """Writes the lengths of all prompts to a .npz file, for `load_split`."""
  arrays = {}
  for split, whole in splits.items():
    parts = {f"{split} {name}": part for name, part in whole.parts.items()}
    for name, part in (parts or {split: whole}).items():
      arrays |= {name: part.lengths, f"{name} key": np.array(part.key)}
  with records.replacing(file) as temporary, open(temporary, "wb") as opened:
    np.savez(opened, **arrays)


def _saved_lengths(file: pathlib.Path | None, split: str, key: str):
  if file is None or not file.is_file():
    return None
  try:
    with np.load(file, allow_pickle=False) as arrays:
      known = str(arrays[f"{split} key"]) == key
      return arrays[split] if known else None
  except Exception:  # damaged files raise many types of errors
    return None
