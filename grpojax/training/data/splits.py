"""A data set's examples, of training and held-out, whose prompts fit."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grpojax.data import datasets, pipeline, survey
from grpojax.data.arithmetic import ENDLESS
from grpojax.data.mixture import Mixture, Part
from grpojax.models import huggingface as hf
from grpojax.runtime.files import records
from grpojax.training.data import mixtures, prompts
from grpojax.training.policy import Policy
from grpojax.training.run import hub_pins
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.run import TrainSettings

MEASURED = 4096
"""Prompts of an endless data set that are read before a run starts, at most."""


class Split(NamedTuple):
  """The examples of one split whose prompts fit.

  Attributes:
    examples: random access to them.
    dropped: Number of those that do not fit; 0 where they are refused.
    survey: Survey of all examples.
    key: Fingerprint of all that the survey's lengths depend on.
    parts: Splits of a mixture's data sets, by name.
  """

  examples: Any
  dropped: int
  survey: survey.Survey
  key: str
  parts: dict[str, Any] = {}


def load_examples(settings: TrainSettings, split: str) -> Any:
  """All examples of a split.

  Args:
    settings: the run's.
    split: "train", seeded by the run's seed, or "test", of which the first
      `eval.num_prompts` are read, whatever the seed.

  Returns:
    Random access to them; a `Mixture` where data.mixture names several data
    sets, of each of which there are `eval.num_prompts` held-out ones.

  Raises:
    ValueError: An error of `datasets.load`.
  """
  options_of_split = {
    "train": {"seed": settings.seed},
    "test": {"size": settings.eval.num_prompts},
  }
  data, parts = settings.data, []

  def load(name, path, options):
    options = hub_pins.data_options(settings, name, path, options)
    return datasets.load(name, split, path, options, **options_of_split[split])

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
) -> Split:
  """The examples of a split, all of which have been read and do fit.

  Args:
    settings: the run's.
    policy: its tokenizer measures the prompts.
    split: "train" or "test".
    cache: a file of `save_lengths`, which may be missing.
    check_signals: called between examples; may raise.

  Raises:
    ValueError: An error of `load_examples` or `survey.survey`, or prompts that
      are too long (data.too_long).
  """
  examples = load_examples(settings, split)
  if isinstance(examples, Mixture):
    return _fitting_parts(
      settings, policy, cache, check_signals, examples, split
    )
  return _fitting(settings, policy, cache, check_signals, examples, split)


def _fitting_parts(
  settings, policy, cache, check_signals, mixture: Mixture, split: str
) -> Split:
  """The examples of a mixture that fit; see `load_split`."""
  fitting = {
    part.name: _fitting(
      settings,
      policy,
      cache,
      check_signals,
      part.examples,
      f"{split} {part.name}",
    )
    for part in mixture.parts
  }
  parts = [p._replace(examples=fitting[p.name].examples) for p in mixture.parts]
  prints = {name: one.survey.fingerprint for name, one in fitting.items()}
  lengths = np.concatenate([one.survey.lengths for one in fitting.values()])
  return Split(
    Mixture(parts),
    sum(one.dropped for one in fitting.values()),
    survey.Survey(
      hashlib.sha256(json.dumps(prints).encode()).hexdigest(), lengths
    ),
    "",
    fitting,
  )


def _fitting(
  settings, policy, cache, check_signals, examples, name: str
) -> Split:
  """The examples of one data set that fit; see `load_split`."""
  encode, digest = prompts.encoder(settings, policy), _digest(settings, policy)
  surveyed = survey.survey(
    examples,
    encode,
    most=min(_prompts_of_run(settings), MEASURED),
    cached=lambda f: _saved_lengths(cache, name, f"{f} {digest}"),
    check_signals=check_signals,
  )
  choose = survey.TOO_LONG[settings.data.too_long]
  limit, endless = settings.data.max_prompt_length, len(examples) >= ENDLESS
  try:
    fits = choose(surveyed.lengths, limit, endless)
  except ValueError as error:
    raise ValueError(f"{name} split: {error}") from error
  key = f"{surveyed.fingerprint} {digest}"
  if fits is None:
    return Split(examples, 0, surveyed, key)
  dropped = len(examples) - len(fits)
  return Split(pipeline.Subset(examples, fits), dropped, surveyed, key)


def _prompts_of_run(settings: TrainSettings) -> int:
  """Prompts that a run takes at most."""
  samples = batches_lib.samples_per_step(settings)
  batches = settings.steps
  if settings.filter_groups.enable:
    batches *= settings.filter_groups.max_num_gen_batches
  return batches * max(
    samples // size for size in batches_lib.group_sizes(settings)
  )


def _digest(settings: TrainSettings, policy: Policy) -> str:
  """Of all but the examples that decides how long prompts are."""
  digest = hashlib.sha256()
  for name in hf.COMPANIONS:
    file = policy.directory / name
    digest.update(file.read_bytes() if file.is_file() else b"")
  limits = ("max_prompt_length", "too_long")
  data = {
    k: v
    for k, v in dataclasses.asdict(settings.data).items()
    if k not in limits
  }
  digest.update(json.dumps(data, sort_keys=True, default=str).encode())
  return digest.hexdigest()


def save_lengths(file: pathlib.Path, splits: dict[str, Split]) -> None:
  """Keeps the lengths of all prompts for `load_split`, by what they depend on.

  Args:
    file: a .npz file, written whole or not at all.
    splits: by their names.
  """
  each = {}
  for split, whole in splits.items():
    each |= {f"{split} {part}": one for part, one in whole.parts.items()}
    each |= {} if whole.parts else {split: whole}
  arrays = {name: one.survey.lengths for name, one in each.items()}
  arrays |= {f"{name} key": np.array(one.key) for name, one in each.items()}
  with records.replacing(file) as temporary, open(temporary, "wb") as whole:
    np.savez(whole, **arrays)


def _saved_lengths(file: pathlib.Path | None, split: str, key: str):
  if file is None or not file.is_file():
    return None
  try:
    with np.load(file, allow_pickle=False) as arrays:
      if str(arrays[f"{split} key"]) == key:
        return arrays[split]
  except Exception:  # zipfile and NumPy raise many kinds
    pass  # it is only a cache
  return None
