"""Groups of completions, as a page gets them."""

import json
import math

from grpojax.reports import completions


def row(step=1, group=0, prompt="p", completion="c", **others):
  texts = {"prompt": prompt, "completion": completion}
  return {"step": step, "group": group} | texts | others


def test_rows_of_a_group_come_together():
  rows = [
    row(completion="a", answer="7", reward=1.0, advantage=0.5),
    row(completion="b", reward=0, truncated=True),
    row(group=1, completion="c"),
    row(step=2, completion="d", answer={"x": 1}),
  ]
  groups = completions.groups(rows)
  texts = [[s["completion"] for s in group["samples"]] for group in groups]
  assert texts == [["a", "b"], ["c"], ["d"]]
  assert [g["answer"] for g in groups] == ["7", None, '{"x": 1}']
  assert [g["step"] for g in groups] == [1, 1, 2]
  first, second = groups[0]["samples"]
  assert (first["reward"], first["advantage"]) == (1.0, 0.5)
  assert (second["reward"], second["truncated"]) == (0, True)


def test_what_does_not_fit_is_left_out():
  rows = [
    row(completion=None),
    row(prompt=3),
    row(
      reward=math.nan,
      rewards=[1],
      tokens=["a", "b"],
      logprobs=[-1.0, math.nan],
      ref_logprobs=[-1.0],
      trainer_logprobs="x",
    ),
    row(tokens=["a", 3], logprobs=[-1.0, -2.0]),
  ]
  ((first, second),) = (g["samples"] for g in completions.groups(rows))
  assert first["reward"] is None and "rewards" not in first
  assert first["logprobs"] == [-1.0, None]
  assert not {"ref_logprobs", "trainer_logprobs"} & first.keys()
  assert not {"tokens", "logprobs"} & second.keys()
  json.dumps(completions.groups(rows), allow_nan=False)


def test_of_too_many_steps_some_are_kept_from_first_to_last():
  sizes = dict.fromkeys(range(10, 210, 10), 100)
  assert completions.steps_within(sizes, 2000) == list(sizes)
  assert completions.steps_within(sizes, 1999) == [10, *range(20, 210, 20)]
  assert completions.steps_within(sizes, 400) == [10, 60, 130, 200]
  assert completions.steps_within(sizes, 1) == [200]
  assert completions.steps_within({}, 1) == []
  assert completions.steps_within({3: 9}, 1) == [3]
  assert completions.steps_within({3: 9, 4: 9}, 18) == [3, 4]
