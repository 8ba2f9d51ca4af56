"""Evaluation of a model on held-out prompts, or comparison of two models.

Estimates use one value per prompt, because samples of a prompt are dependent.

Models differ in prompt format and tokenizer, so `data.too_long = "drop"` may
drop different prompts. Two models are compared on the prompts that both keep.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from grpojax.core import meshes
from grpojax.core.random_keys import seed_key
from grpojax.core.types import Params, Prompts
from grpojax.data.pipeline import Subset
from grpojax.rewards import exact, functions, math
from grpojax.rewards.conventions import CORRECT
from grpojax.rewards.pool import Failure, all_failures
from grpojax.runtime.terminal.screen import printable
from grpojax.statistics import intervals
from grpojax.statistics.pass_at_k import SILENT, majority_at_k, pass_at_k
from grpojax.training import policies
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits as splits_lib
from grpojax.training.policies import Policy
from grpojax.training.settings import mixtures
from grpojax.training.settings.run import Facts, TrainSettings, completed
from grpojax.training.step import draws, scoring

VOTING = ("exact_answer", *functions.READ_ANSWERS)
"""Reward functions that extract an answer, for majority votes."""
REWARD = "reward"
UNSCORED = "no reward could be computed, which counts as wrong"
TITLES = {"accuracy": "greedy accuracy", REWARD: "mean reward"}


class HeldOut(NamedTuple):
  """Held-out problems for one model."""

  batches: list[tuple[Prompts, list[dict[str, Any]]]]  # in data set order
  too_long: int  # number of dropped problems

  @property
  def count(self) -> int:
    """Number of problems."""
    return sum(len(examples) for _, examples in self.batches)


class Evaluation(NamedTuple):
  """Completions of held-out prompts, and their rewards."""

  rewards: np.ndarray  # [prompts, samples]; nan counts as wrong
  texts: list[list[str]]  # completions, [prompts][samples]
  examples: list[dict[str, Any]]  # problems with their "prompt_text"
  lengths: np.ndarray  # number of tokens [prompts, samples]
  failures: list[Failure] = []  # failed rewards


def _in_common(
  names: Sequence[str], splits: Sequence[splits_lib.Split]
) -> list[Any]:
  """Returns each model's examples, without prompts too long for some model."""
  text = functools.partial(json.dumps, sort_keys=True)
  prompts = [
    [text(x.examples[i]["prompt"]) for i in range(len(x.examples))]
    for x in splits
  ]
  common = set.intersection(*map(set, prompts))
  if not common:
    raise ValueError(
      f"no held-out prompt fits both {' and '.join(names)}: raise "
      "--config.data.max_prompt_length"
    )
  return [
    Subset(split.examples, [i for i, p in enumerate(texts) if p in common])
    for split, texts in zip(splits, prompts, strict=True)
  ]


def held_out_problems(
  settings: TrainSettings,
  names: Sequence[str],
  models: Sequence[Policy],
) -> list[HeldOut]:
  """Returns the held-out problems that fit all models, in each model's format.

  All models get the same problems in the same order. ValueError if no problem
  fits all models, if a prompt is too long under `data.too_long = "refuse"`, or
  if a column of a reward function is missing.
  """

  def for_each(function, *columns):
    results = []
    for name, *values in zip(names, models, *columns, strict=True):
      try:
        results.append(function(*values))
      except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return results

  loaded = splits_lib.load_examples(settings, "test")
  load_split = functools.partial(splits_lib.load_split, examples=loaded)
  splits = for_each(lambda p: load_split(settings, p, "test"))
  longest = splits_lib.longest_prompt(*splits)
  settings = completed(settings, Facts(prompt_length=longest))
  lengths = settings.data.max_prompt_length, settings.sampling.max_new_tokens
  check = policies.check_positions
  for_each(lambda p: check(p.files, *lengths))
  resolved = scoring.resolve_functions(settings)
  scoring.check_columns(settings, resolved, splits[0])
  examples = [split.examples for split in splits]
  if any(split.dropped for split in splits):
    examples = _in_common(names, splits)

  def held_out(policy, split, fitting):
    batches = prompts_lib.held_out(settings, policy, fitting)
    return HeldOut(list(batches), split.dropped)

  return for_each(held_out, splits, examples)


def evaluate(
  settings: TrainSettings,
  source: draws.Source,
  params: Params,
  batches: Iterable[tuple[Prompts, list[dict[str, Any]]]],
  step: int,
  on_progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
  """Samples and scores completions of every batch of a data set.

  Uses `params`, not the policy's parameters. The last batch may be smaller.
  `step` is the number of finished steps, for rewards that depend on it
  (`scoring.with_step`). The source's `check_signals` is called before each
  batch, there with `together=True` in all processes, and while waiting;
  `on_progress` gets the number of finished prompts.
  """
  source = source._replace(keeps_texts=True)
  reward_pool = source.reward_pool
  drawn = []
  lengths = []
  key = seed_key(settings.seed)
  done = 0
  for i, (prompts, examples) in enumerate(batches):
    source.check_signals(together=True)
    examples = scoring.with_step(
      reward_pool.pool, examples, step, settings.steps
    )
    # Fill the last batch with empty prompts, to compile a single program.
    missing = settings.eval.batch_size - len(prompts.prompt_ids)
    pad = lambda x, n=missing: np.pad(x, [(0, n)] + [(0, 0)] * (x.ndim - 1))
    padded = jax.tree.map(pad, prompts)
    if source.mesh is not None:
      padded = meshes.place(padded, source.mesh, "batch")
    args = params, padded, examples, jax.random.fold_in(key, i)
    draw = draws.draw(source, *args, draws.Timer()).collect()
    mask = meshes.fetch(draw.rollout.completion_mask)[: len(examples)]
    lengths.append(np.sum(mask, axis=-1))
    drawn.append(draw._replace(rollout=None))
    done += len(examples)
    on_progress(done)
  correctness = functools.partial(scoring.correctness, reward_pool)
  return Evaluation(
    np.concatenate([correctness(x.rewards, x.examples) for x in drawn]),
    [group for x in drawn for group in x.texts],
    [example for x in drawn for example in x.examples],
    np.concatenate(lengths),
    [y for x in drawn for y in all_failures(x.rewards)],
  )


def failed(failures: Sequence[Failure]) -> str:
  """Returns a line with the number of failed rewards and the first failure."""
  first = failures[0]
  # The reason may have several lines and quote the completion.
  reason = printable(" ".join(first.reason.split()))
  return (
    f"{len(failures)} rewards failed; the first: {first.function} "
    f"({reason}) for {first.completion[:80]!r}"
  )


Answer = Callable[[str, str], str | None]
"""Maps a completion and its prompt to its answer in canonical form, or None."""


def answer_reader(settings: TrainSettings, name: str) -> Answer:
  """Returns the function by which a reward in `VOTING` extracts answers."""
  if name == "exact_answer":
    return lambda completion, prompt: exact.given_answer(completion)
  options = scoring.reward_options(settings)[name]
  return functools.partial(math.given_answer, **options)


def answer_labels(
  result: Evaluation, answer: Answer
) -> Int[np.ndarray, "prompts samples"]:
  """Numbers each prompt's answers: 7, 3, 7 and None become [0, 1, 0, -1]."""
  rows = []
  for group, example in zip(result.texts, result.examples, strict=True):
    prompt = example.get("prompt_text", "")
    answers = [answer(text, prompt) for text in group]
    names = {name: i for i, name in enumerate(dict.fromkeys(answers))}
    rows.append([SILENT if a is None else names[a] for a in answers])
  # A sample with a failed reward does not vote.
  return np.where(np.isnan(result.rewards), SILENT, rows)


def per_prompt(
  result: Evaluation,
  ks: Sequence[int] = (),
  answer: Answer | None = None,
  graded: bool = False,
) -> dict[str, np.ndarray]:
  """Returns metrics by name, each an array with a value per prompt.

  The metrics are pass@k for each of `ks`, or the first completion's accuracy if
  `ks` is empty; maj@k if there is an `answer`; and the mean reward, if no
  reward is missing and rewards are `graded` or not all 0 or 1. A single prompt
  has only the accuracy, because other intervals need several prompts.
  """
  right = result.rewards >= CORRECT
  values = {f"pass@{k}": np.asarray(pass_at_k(jnp.array(right), k)) for k in ks}
  if not ks:
    values["accuracy"] = right[:, 0].astype(np.float32)
  if answer is not None:
    labels = answer_labels(result, answer)
    values |= {f"maj@{k}": majority_at_k(labels, right, k) for k in ks}
  graded = graded or not _is_binary(result.rewards)
  if graded and np.isfinite(result.rewards).all():
    values[REWARD] = result.rewards.mean(axis=-1)
  return _with_interval(values, np.arange(len(right)))


def _with_interval(
  values: Mapping[str, np.ndarray], rows: Int[np.ndarray, "n"]
) -> dict[str, np.ndarray]:
  """Selects prompts by index; for a single prompt, keeps only the accuracy."""
  several = len(rows) > 1
  names = [name for name in values if several or name == "accuracy"]
  return {name: values[name][rows] for name in names}


def outcomes(
  result: Evaluation, accuracy: Float[np.ndarray, "B"]
) -> dict[str, Any]:
  """Returns a row of evaluations.jsonl without its step.

  `accuracy` is from `per_prompt`. In the row, `right` has a character 0 or 1
  per prompt, and `problems` is a fingerprint of the prompts and answers in
  order: evaluations with equal fingerprints can be compared.
  """
  problems = [  # 7 and "7" are the same answer
    [e.get("prompt"), str(e["answer"]) if "answer" in e else None]
    for e in result.examples
  ]
  text = json.dumps(problems, sort_keys=True, default=repr)
  return {
    "problems": hashlib.sha256(text.encode()).hexdigest()[:16],
    "right": "".join(map(str, accuracy.astype(int).tolist())),
  }


def by_data_set(
  settings: TrainSettings, result: Evaluation, values: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
  """Returns metrics of `per_prompt` per data set; {} without a mixture."""
  each = {
    name: _with_interval(values, rows)
    for name, rows in mixtures.by_source(settings, result.examples).items()
  }
  return {name: part for name, part in each.items() if part}


def _is_binary(*values: np.ndarray) -> bool:
  return all(np.isin(v, (0, 1)).all() for v in values)


def estimate(values: np.ndarray) -> tuple[float, float, float]:
  """Returns the mean over prompts and its 95% interval: mean, low, high.

  The interval is Wilson's for values 0 and 1, `share_interval` for other values
  in [0, 1], else Student's.
  """
  if _is_binary(values):
    return intervals.wilson_interval(int(np.sum(values)), len(values))
  inside = values.min() >= 0 and values.max() <= 1
  interval = intervals.share_interval if inside else intervals.mean_interval
  return interval(values)


def numbers(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Converts estimates to JSON: [mean, low, high], or 3 fields for accuracy."""
  estimates = {name: list(estimate(value)) for name, value in values.items()}
  accuracy = estimates.pop("accuracy", [])
  names = ("accuracy", "accuracy_low", "accuracy_high")
  return dict(zip(names, accuracy, strict=False)) | estimates


def compare(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> dict[str, intervals.PairedDifference]:
  """Compares two models' metrics of `per_prompt`: paired differences a - b.

  The interval is Agresti and Min's for values 0 and 1, else Student's.
  """
  return {
    name: intervals.paired_proportions(a[name] == 1, b[name] == 1)
    if _is_binary(a[name], b[name])
    else intervals.paired_difference(a[name], b[name])
    for name in a
    if name in b
  }


def text(name: str, mean: float, low: float, high: float, sign="") -> str:
  """Formats an estimate and its interval, in percent unless it is a reward."""
  form = f"{sign}.3g" if name == REWARD else f"{sign}.1%"
  return f"{mean:{form}}  [{low:{form}}, {high:{form}}]"


def lines(values: Mapping[str, np.ndarray]) -> list[str]:
  """Returns a line to print per metric of a model."""
  return [
    f"{TITLES.get(name, name)}  {text(name, *estimate(value))}"
    for name, value in values.items()
  ]


def table(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> list[str]:
  """Returns the lines of a table of two models' metrics and differences."""
  rows = [("", "model", "compare", "model - compare", "p")]
  for name, (*difference, p_value) in compare(a, b).items():
    both = (text(name, *estimate(values[name])) for values in (a, b))
    row = TITLES.get(name, name), *both, text(name, *difference, sign="+")
    rows.append((*row, f"{p_value:.2g}"))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
