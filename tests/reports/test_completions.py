"""Groups of completions in a page."""

from grpojax.training.report import run_report


def row(step=1, group=0, prompt="p", completion="c", **others):
  texts = {"prompt": prompt, "completion": completion}
  return {"step": step, "group": group} | texts | others


def test_rows_are_grouped_by_prompt():
  rows = [
    row(completion="a", answer="7", reward=1.0, advantage=0.5),
    row(completion="b", reward=0, truncated=True),
    row(group=1, completion="c"),
    row(step=2, completion="d", answer={"x": 1}),
  ]
  groups = run_report.sample_groups(rows)
  texts = [[s["completion"] for s in group["samples"]] for group in groups]
  assert texts == [["a", "b"], ["c"], ["d"]]
  assert [g["answer"] for g in groups] == ["7", None, '{"x": 1}']
  assert [g["step"] for g in groups] == [1, 1, 2]
  first, second = groups[0]["samples"]
  assert (first["reward"], first["advantage"]) == (1.0, 0.5)
  assert (second["reward"], second["truncated"]) == (0, True)


def test_tokens_of_an_environment_and_rewards_of_turns():
  turns = [
    {"by": "model", "text": "ab", "tokens": 2, "reward": 0.5, "advantage": 0.2},
    {"by": "environment", "text": "c", "tokens": 1},
    {"by": "model", "text": "d", "tokens": 1, "reward": None},
  ]
  rows = [row(tokens=[*"abcd"], turns=turns, advantage=[0.5, 0.5, 0, 1.0])]
  ((sample,),) = (group["samples"] for group in run_report.sample_groups(rows))
  assert sample["observed"] == [False, False, True, False]
  assert sample["turn_rewards"] == {1: 0.5} and "advantage" not in sample
  assert sample["turn_advantages"] == {1: 0.2}


def test_steps_within_budget_are_evenly_spaced():
  sizes = dict.fromkeys(range(10, 210, 10), 100)
  assert run_report.steps_within(sizes, 2000) == list(sizes)
  assert run_report.steps_within(sizes, 1999) == [10, *range(20, 210, 20)]
  assert run_report.steps_within(sizes, 400) == [10, 60, 130, 200]
  assert run_report.steps_within(sizes, 1) == [200]
  assert run_report.steps_within({}, 1) == []
