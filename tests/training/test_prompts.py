"""A config's data sets, and their prompts."""

import functools

import numpy as np
import pytest

from grpojax.core.types import Prompts
from grpojax.data import drawn
from grpojax.training import policy as policy_lib
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits as splits_lib


@pytest.fixture(scope="module")
def policy():
  return policy_lib.open_policy("arithmetic-instruct")


@pytest.fixture
def load(policy, settings_with):
  """`(split, **settings) -> Split`."""
  return lambda split="train", **changes: splits_lib.load_split(
    settings_with(**changes), policy, split
  )


def test_problems_of_a_run(settings_with):
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
    "data__max_prompt_length": 12,  # 5 of which are the template's
  }


def test_long_prompts_are_refused_or_dropped(
  policy, jsonl, settings_with, load, tmp_path
):
  settings = settings_with(**jsonl)
  train = splits_lib.load_examples(settings, "train")
  assert len(train) == 12
  with pytest.raises(ValueError, match="train split: 7 of 12 .* 11 has 19"):
    load(**jsonl)
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)  # of a run's limit
  with pytest.raises(ValueError, match="restore .* or set data.too_long"):
    splits_lib.load_split(settings, policy, "train", tmp_path / "lengths.npz")
  with pytest.raises(ValueError, match="data.too_long = 'drop'"):
    list(prompts_lib.held_out(settings, policy, train))
  jsonl["data__too_long"] = "drop"
  for split in ("train", "test"):
    found = load(split, **jsonl)
    batches = list(prompts_lib.held_out(settings, policy, found.examples))
    answers = [e["answer"] for _, examples in batches for e in examples]
    assert answers == [str(n) for n in range(1, len(answers) + 1)]
    assert found.dropped == 12 - len(answers) > 0
    lengths = [p.prompt_mask.sum(-1).max() for p, _ in batches]
    assert max(lengths) == 12
  assert len(load("test", **jsonl, eval__num_prompts=3).examples) == 3
  with pytest.raises(ValueError, match="all 12 prompts are longer"):
    load(**jsonl | {"data__max_prompt_length": 5})


def test_the_config_sets_the_prompt(policy, jsonl, load, settings_with):
  jsonl |= {"data__template": "{prompt}+1", "data__max_prompt_length": 32}
  settings, examples = settings_with(**jsonl), load(**jsonl).examples
  batches = prompts_lib.held_out(settings, policy, examples)
  prompts, (example, *_) = next(batches)
  assert example["prompt_text"] == "Q: 9+1\nA: " and example["answer"] == "1"
  assert prompts.prompt_ids.shape[1] == 24  # trimmed: the longest has 20
  ids = prompts.prompt_ids[0][np.asarray(prompts.prompt_mask[0])]
  assert policy.tokenizer.decode(ids) == example["prompt_text"]


@pytest.mark.parametrize("kind, count", [("text", 0), ("control", 1)])
def test_the_config_says_what_special_tokens_are(
  policy, kind, count, settings_with
):
  settings = settings_with(data__special_tokens=kind)
  examples = [{"prompt": "1<|endoftext|>", "answer": "1"}]
  prompts, (example,) = next(prompts_lib.held_out(settings, policy, examples))
  ids = prompts.prompt_ids[0][np.asarray(prompts.prompt_mask[0])]
  assert policy.tokenizer.decode(ids) == example["prompt_text"]
  assert (np.asarray(ids) == policy.tokenizer.eos_token_id).sum() == count


@pytest.mark.parametrize(
  "changes, hint",
  [
    ({"data.path": "x"}, "arithmetic has no files"),
    ({"data.options.sise": 3}, "data.options.sise.*it takes difficulty, size"),
    ({"data.name": "jsonl"}, "data.path"),
    ({"data.name": "jsonl", "data.path": "/nowhere"}, "/nowhere"),
    ({"data.too_long": "drop", "steps": 1}, "endless"),
  ],
)
def test_mistakes_are_refused(changes, hint, load):
  with pytest.raises(ValueError, match=hint):
    load(**changes)


def test_prompts_are_measured_once(
  policy, jsonl, settings_with, tmp_path, monkeypatch
):
  changes = jsonl | {"data__too_long": "drop"}
  file, measured = tmp_path / "lengths.npz", []
  encode = prompts_lib.tokenizer_lib.encode_prompt

  def counted(*args, **options):
    measured.append(1)
    return encode(*args, **options)

  monkeypatch.setattr(prompts_lib.tokenizer_lib, "encode_prompt", counted)

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
  changes["data__max_prompt_length"] = 14  # which measures nothing else
  assert load(0).dropped == first.dropped - 2
  changes["data__template"] = "{prompt}?\n"
  load(24)
  train = tmp_path / "train.jsonl"
  train.write_text(train.read_text().replace("999", "998", 1))
  load(12)  # the other split has not changed
  for damaged in (b"PK\x03\x04 and no more", b""):
    file.write_bytes(damaged)
    load(24)


@pytest.mark.parametrize(
  "longest, size", [(1, 3), (3, 3), (4, 5), (6, 8), (8, 8), (9, 10), (10, 10)]
)
def test_padding_that_all_prompts_share_is_cut(longest, size):
  """To quarters of 10, rounded up; the tokens are all there."""
  mask = np.arange(10) < np.array([[1], [longest], [0]])
  ids = np.where(mask, np.arange(30).reshape(3, 10), -1)
  found = prompts_lib.trim(Prompts(ids, mask, {"answer": np.arange(3)}))
  assert found.prompt_ids.shape == found.prompt_mask.shape == (3, size)
  np.testing.assert_array_equal(found.prompt_mask.sum(-1), mask.sum(-1))
  np.testing.assert_array_equal(found.prompt_ids[found.prompt_mask], ids[mask])
  np.testing.assert_array_equal(found.targets["answer"], np.arange(3))


def test_prompts_have_room_for_the_longest_of_the_data(
  jsonl, settings_with, load
):
  jsonl["data__max_prompt_length"] = 0
  settings, train, test = settings_with(**jsonl), load(**jsonl), load(**jsonl)
  short = test._replace(lengths=test.lengths[:4])
  filled = splits_lib.with_prompt_length(settings, short, train)
  assert filled.data.max_prompt_length == max(train.lengths) == 19
  kept = settings_with(data__max_prompt_length=99)
  assert splits_lib.with_prompt_length(kept, train) == kept
  # An endless one may have longer prompts than those that are measured.
  endless = load(steps=1)
  assert len(endless.examples) == drawn.ENDLESS
  filled = splits_lib.with_prompt_length(settings, test, endless)
  assert filled.data.max_prompt_length == 32 > max(endless.lengths)


EXAMPLES = [{"prompt": "x" * (i % 5 + 1), "answer": str(i)} for i in range(10)]


def test_the_fingerprint_is_of_the_examples_and_their_order():
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


def test_held_out_prompts_that_are_training_prompts_are_counted(
  load, write_data
):
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
def test_an_endless_data_set_is_read_as_far_as_it_is_used(load, monkeypatch):
  monkeypatch.setattr(splits_lib, "FINGERPRINTED", 50)
  monkeypatch.setattr(splits_lib, "MEASURED", 300)
  split = load(steps=1, data__max_prompt_length=99)
  assert len(split.examples) == drawn.ENDLESS
  prompts_of_step = 256 // 8  # the default's samples and group size
  assert len(split.lengths) == prompts_of_step < splits_lib.FINGERPRINTED
  longer = load(steps=10**6, data__max_prompt_length=99)
  assert len(longer.lengths) == splits_lib.MEASURED
  assert longer.fingerprint == split.fingerprint


def test_a_long_pass_may_be_ended_and_says_how_far_it_is(monkeypatch, capsys):
  calls = iter(range(99))

  def check_signals():
    if next(calls) == 4:
      raise KeyboardInterrupt

  monkeypatch.setattr(splits_lib, "_REPORT_EVERY", -1)
  with pytest.raises(KeyboardInterrupt):
    splits_lib.fingerprint(EXAMPLES, check_signals)
  lines = [f"read {i} of 10 prompts" for i in range(4)]
  assert capsys.readouterr().out.splitlines() == lines


def test_a_prompt_without_tokens_is_refused():
  encode = lambda prompt: (prompt, list(prompt))
  lengths = functools.partial(splits_lib.prompt_lengths, encode=encode, most=99)
  found = lengths(EXAMPLES, check_signals=lambda: None)
  np.testing.assert_array_equal(found, [1, 2, 3, 4, 5] * 2)
  with pytest.raises(ValueError, match="example 10: a prompt without tokens"):
    lengths([*EXAMPLES, {"prompt": ""}], check_signals=lambda: None)
