"""Data splits and prompts of a run."""

import functools

import numpy as np
import pytest

from grpojax.core.types import Prompts
from grpojax.data import drawn
from grpojax.training import policies
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits as splits_lib
from grpojax.training.files.sources import find_files


@pytest.fixture(scope="module")
def policy():
  return policies.open_policy(find_files("arithmetic-instruct"))


@pytest.fixture
def load(policy, settings_with):
  """`(split, **settings) -> Split`."""
  return lambda split="train", **changes: splits_lib.load_split(
    settings_with(**changes), policy, split
  )


def test_the_seed_changes_training_prompts_only(settings_with):
  def prompts(split, **changes):
    examples = splits_lib.load_examples(settings_with(**changes), split)
    return [examples[i]["prompt"] for i in range(20)]

  assert prompts("train") == prompts("train") != prompts("train", seed=1)
  assert prompts("test") == prompts("test", seed=1)
  more = settings_with(eval__num_prompts=21)
  assert len(splits_lib.load_examples(more, "test")) == 21


@pytest.fixture
def jsonl(write_data):
  """Prompts of 1 to 12 characters, in a file for both splits."""
  rows = [{"question": "9" * n, "answer": str(n)} for n in range(1, 13)]
  return {
    "data__name": "jsonl",
    "data__path": write_data(train=rows, test=rows),
    "data__options__prompt": "question",
    "data__template": "{prompt}",
    "data__max_prompt_length": 12,  # with 5 tokens of the template
  }


def test_long_prompts_are_refused_or_dropped(
  policy, jsonl, settings_with, load, tmp_path
):
  settings = settings_with(**jsonl)
  train = splits_lib.load_examples(settings, "train")
  assert len(train) == 12
  with pytest.raises(ValueError, match="train split: 7 of 12 .* 11 has 19"):
    load(**jsonl)
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)  # a started run
  with pytest.raises(ValueError, match="restore .* or set data.too_long"):
    splits_lib.load_split(settings, policy, "train", tmp_path / "lengths.npz")
  with pytest.raises(ValueError, match="data.too_long = 'drop'"):
    list(prompts_lib.held_out(settings, policy, train))
  jsonl["data__too_long"] = "drop"
  for split in ("train", "test"):
    result = load(split, **jsonl)
    batches = list(prompts_lib.held_out(settings, policy, result.examples))
    answers = [e["answer"] for _, examples in batches for e in examples]
    assert answers == [str(n) for n in range(1, len(answers) + 1)]
    assert result.dropped == 12 - len(answers) > 0
    lengths = [p.prompt_mask.sum(-1).max() for p, _ in batches]
    assert max(lengths) == 12
  assert len(load("test", **jsonl, eval__num_prompts=3).examples) == 3
  with pytest.raises(ValueError, match="all 12 prompts are longer"):
    load(**jsonl | {"data__max_prompt_length": 5})


def test_prompts_use_the_template_and_are_trimmed(
  policy, jsonl, load, settings_with
):
  jsonl |= {"data__template": "{prompt}+1", "data__max_prompt_length": 32}
  settings = settings_with(**jsonl)
  examples = load(**jsonl).examples
  batches = prompts_lib.held_out(settings, policy, examples)
  prompts, (example, *_) = next(batches)
  assert example["prompt_text"] == "Q: 9+1\nA: " and example["answer"] == "1"
  assert prompts.prompt_ids.shape[1] == 24  # trimmed: the longest has 20
  ids = prompts.prompt_ids[0][np.asarray(prompts.prompt_mask[0])]
  assert policy.tokenizer.decode(ids) == example["prompt_text"]


@pytest.mark.parametrize(
  "changes, hint",
  [
    ({"data.options.sise": 3}, "data.options.sise.*it takes difficulty, size"),
    ({"data.too_long": "drop", "steps": 1}, "endless"),
  ],
)
def test_invalid_data_settings_are_refused(changes, hint, load):
  with pytest.raises(ValueError, match=hint):
    load(**changes)


def test_prompt_lengths_are_cached(
  policy, jsonl, settings_with, tmp_path, monkeypatch
):
  changes = jsonl | {"data__too_long": "drop"}
  file = tmp_path / "lengths.npz"
  measured = []
  encode = prompts_lib.tokenization.encode_prompt

  def counted(*args, **options):
    measured.append(1)
    return encode(*args, **options)

  monkeypatch.setattr(prompts_lib.tokenization, "encode_prompt", counted)

  def load(expected):
    measured.clear()
    settings = settings_with(**changes)
    splits = {
      split: splits_lib.load_split(settings, policy, split, file)
      for split in ("train", "test")
    }
    assert len(measured) == expected
    splits_lib.save_lengths(file, splits)
    return splits["train"]

  first = load(24)
  again = load(0)
  assert again.dropped == first.dropped > 0
  changes["data__max_prompt_length"] = 14  # needs no measurement
  assert load(0).dropped == first.dropped - 2
  changes["data__template"] = "{prompt}?\n"
  load(24)
  train = tmp_path / "train.jsonl"
  train.write_text(train.read_text().replace("999", "998", 1))
  load(12)  # the other split is unchanged
  for damaged in (b"PK\x03\x04 and no more", b""):
    file.write_bytes(damaged)
    load(24)


@pytest.mark.parametrize(
  "longest, size", [(1, 3), (3, 3), (4, 5), (6, 8), (8, 8), (9, 10), (10, 10)]
)
def test_trim_removes_shared_padding(longest, size):
  """The new length is a quarter of 10 times 1 to 4, rounded up."""
  mask = np.arange(10) < np.array([[1], [longest], [0]])
  ids = np.where(mask, np.arange(30).reshape(3, 10), -1)
  result = prompts_lib.trim(Prompts(ids, mask, {"answer": np.arange(3)}))
  assert result.prompt_ids.shape == result.prompt_mask.shape == (3, size)
  np.testing.assert_array_equal(result.prompt_mask.sum(-1), mask.sum(-1))
  np.testing.assert_array_equal(
    result.prompt_ids[result.prompt_mask], ids[mask]
  )
  np.testing.assert_array_equal(result.targets["answer"], np.arange(3))


def test_the_prompt_length_is_set_by_the_longest_prompt(jsonl, load):
  jsonl["data__max_prompt_length"] = 0
  train = load(**jsonl)
  test = load(**jsonl)
  short = test._replace(lengths=test.lengths[:4])
  assert splits_lib.longest_prompt(short, train) == max(train.lengths) == 19
  # Endless data may have longer prompts than the measured prompts.
  endless = load(steps=1)
  assert len(endless.examples) == drawn.ENDLESS
  assert splits_lib.longest_prompt(test, endless) == 32 > max(endless.lengths)


EXAMPLES = [{"prompt": "x" * (i % 5 + 1), "answer": str(i)} for i in range(10)]


def test_the_fingerprint_depends_on_examples_and_order():
  def fingerprint(examples):
    return splits_lib.fingerprint(examples, lambda: None)[0]

  first = fingerprint(EXAMPLES)
  assert fingerprint([dict(reversed(e.items())) for e in EXAMPLES]) == first
  others = [
    EXAMPLES[:-1],
    EXAMPLES[::-1],
    [*EXAMPLES[:-1], EXAMPLES[-1] | {"answer": "10"}],
    [*EXAMPLES[:-1], EXAMPLES[-1] | {"level": 1}],
  ]
  assert len({first, *map(fingerprint, others)}) == 5


def test_held_out_prompts_in_the_training_split_are_counted(load, write_data):
  def split_of(prompts, **changes):
    rows = [{"prompt": prompt, "answer": ""} for prompt in prompts]
    path = write_data(train=rows)
    return load(data__name="jsonl", data__path=path, **changes)

  chat = [{"role": "user", "content": "1+1="}]
  spaced = [{"role": "user", "content": "1+1=\n"}]
  train = split_of(["1", "2", "1", "9" * 20, chat])
  held_out = split_of(["2", "2 ", "3", "9" * 20, spaced])
  assert splits_lib.in_training(train, held_out) == 4
  assert splits_lib.in_training(held_out, held_out) == 5
  short = {"data__too_long": "drop", "data__max_prompt_length": 15}
  train = split_of(["1", "2", "9" * 20], **short)
  held_out = split_of(["2", "3", "9" * 20], **short)
  assert splits_lib.in_training(train, held_out) == 1
  endless = load(steps=1)
  assert splits_lib.in_training(endless, endless) == 0


@pytest.mark.slow
def test_endless_data_are_measured_only_as_far_as_used(load, monkeypatch):
  monkeypatch.setattr(splits_lib, "FINGERPRINTED", 50)
  monkeypatch.setattr(splits_lib, "MEASURED", 300)
  split = load(steps=1, data__max_prompt_length=99)
  assert len(split.examples) == drawn.ENDLESS
  prompts_of_step = 256 // 8  # the default's samples and group size
  assert len(split.lengths) == prompts_of_step < splits_lib.FINGERPRINTED
  longer = load(steps=10**6, data__max_prompt_length=99)
  assert len(longer.lengths) == splits_lib.MEASURED
  assert longer.fingerprint == split.fingerprint


def test_a_prompt_without_tokens_is_refused():
  encode = lambda prompt: (prompt, list(prompt))
  lengths = functools.partial(splits_lib.prompt_lengths, encode=encode, most=99)
  values = lengths(EXAMPLES, check_signals=lambda: None)
  np.testing.assert_array_equal(values, [1, 2, 3, 4, 5] * 2)
  with pytest.raises(ValueError, match="example 10: the prompt .* no tok"):
    lengths([*EXAMPLES, {"prompt": ""}], check_signals=lambda: None)
