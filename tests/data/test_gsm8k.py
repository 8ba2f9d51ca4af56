"""On 32 problems of each split, from the files that OpenAI published (MIT)."""

import pathlib

import pytest

from grpojax.data import gsm8k
from grpojax.rewards.exact import exact_answer

SAMPLE = pathlib.Path(__file__).parent / "gsm8k"


def test_problems_in_the_order_of_the_file():
  train, test = (gsm8k.load(s, path=SAMPLE) for s in gsm8k.SPLITS)
  assert len(train) == len(test) == 32
  assert train[0]["prompt"].startswith("Natalia sold clips to 48")
  assert train[0]["answer"] == "72" and test[0]["answer"] == "18"
  assert not {x["prompt"] for x in train} & {x["prompt"] for x in test}
  assert [x["answer"] for x in gsm8k.load("train", path=SAMPLE, size=3)] == [
    "72",
    "10",
    "5",
  ]
  with pytest.raises(IndexError):
    train[32]


def test_the_worked_solution_is_right():
  for example in gsm8k.load("train", path=str(SAMPLE)):
    assert exact_answer("", example["solution"], example) == 1.0
    assert exact_answer("", "#### -1", example) == 0.0


@pytest.mark.parametrize(
  "line",
  [
    "no json",
    "[1, 2]",
    '{"question": "How many?"}',
    '{"question": "How many?", "answer": 3}',
    '{"question": "How many?", "answer": "three"}',
    '{"question": "", "answer": "#### 3"}',
  ],
)
def test_a_bad_line_is_named(line, tmp_path):
  good = '{"question": "How many?", "answer": "One. #### 1"}'
  (tmp_path / "test.jsonl").write_text(f"{good}\n\n{line}\n")
  assert gsm8k.load("test", path=tmp_path, size=1)[0]["answer"] == "1"
  with pytest.raises(ValueError, match="test.jsonl, line 3"):
    gsm8k.load("test", path=tmp_path)


def test_what_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match="unknown split 'dev'"):
    gsm8k.load("dev", path=SAMPLE)
  for path in ("", tmp_path):
    with pytest.raises(ValueError, match="data.options.path"):
      gsm8k.load("train", path=path)
