"""Reward functions of TRL's and verl's users, run as they are.

The examples are TRL 1.16's own (docs/source/grpo_trainer.md, rewards/) and
verl 0.9.1's (utils/reward_score/gsm8k.py, its guide to reward functions).
"""

import math
import sys

import numpy as np
import pytest

from grpojax.rewards import conventions, functions, groups
from grpojax.rewards.pool import Pool

TRL = '''
import re

def reward_func(completion_ids, **kwargs):
  """Reward function that assigns higher scores to longer completions."""
  return [float(len(ids)) for ids in completion_ids]

def format_reward_func(completions, **kwargs):
  pattern = r"^<think>.*?</think><answer>.*?</answer>$"
  completion_contents = [completion[0]["content"] for completion in completions]
  matches = [re.match(pattern, content) for content in completion_contents]
  return [1.0 if match else 0.0 for match in matches]

def correct_func(completions, ground_truth, **kwargs):
  # Regular expression to capture content inside \\\\boxed{}
  matches = [re.search(r"\\\\boxed\\{(.*?)\\}", c) for c in completions]
  contents = [match.group(1) if match else "" for match in matches]
  # Reward 1 if the content is the same as the ground truth, 0 otherwise
  return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def math_reward_func(prompts, completions, task, **kwargs):
  return [
    (1.0 if c == "right" else -1.0) if t == "math" else None
    for c, t in zip(completions, task)
  ]

def state_func(completions, trainer_state, **kwargs):
  done = trainer_state.global_step / trainer_state.max_steps
  return [done] * len(completions)

def metric_func(completions, log_metric, log_extra, **kwargs):
  log_extra("upper", [c.upper() for c in completions])
  log_metric("mean_length", sum(map(len, completions)) / len(completions))
  return [0.5] * len(completions)

def seen(prompts, completions, **kwargs):
  names = "completion_ids trainer_state log_metric log_extra".split()
  assert all(name in kwargs for name in names), sorted(kwargs)
  assert "prompt" not in kwargs and kwargs["answer"] == ["7"] * len(prompts)
  assert all(p == "What?" for p in prompts)
  return range(len(completions))

def odd(completions, how="short", **kwargs):
  if how == "short":
    return [1.0]
  if how == "number":
    return 1.0
  if how == "raises":
    raise RuntimeError("no idea")
  if how == "hangs":
    re.fullmatch("(a*)*b", "a" * 60)
  if how == "exits":
    import os
    os._exit(3)
  values = {"b": float("nan"), "c": "x"}
  return [values.get(c, 1) for c in completions]
'''
VERL = """
import re

def extract_solution(solution_str):
  solutions = re.findall("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
  return solutions[-1].replace(",", "").replace("$", "") if solutions else None

def gsm8k(
  solution_str, ground_truth, method="strict", format_score=0.0, score=1.0
):
  answer = extract_solution(solution_str=solution_str)
  if answer is None:
    return 0
  return score if answer == ground_truth else format_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  assert data_source == "openai/gsm8k" and extra_info["index"] == 3
  right = gsm8k(solution_str, ground_truth)
  return {"score": right, "acc": right > 0, "pred": solution_str, "length":
          len(solution_str), "bad": float("nan")}

def everything(solution_str, **kwargs):
  assert sorted(kwargs) == ["data_source", "extra_info", "ground_truth"], kwargs
  return float(kwargs["extra_info"] == {})

def by_names(completions, log_metric, log_extra, trainer_state):
  log_metric(name="named", value=trainer_state.global_step + 2.0)
  log_extra(column="text", values=completions)
  return [{"score": 1.0, "other": 3.0} for _ in completions]


def large(completions):
  return [10**400, {"score": 1.0, "big": 10**400}]


def unordered(completions):
  return {2.0, 1.0}


def types(solution_str, ground_truth, extra_info):
  values = ground_truth, *extra_info.values()
  return ["int", "float", "bool", "str"] == [type(x).__name__ for x in values]


def info(solution_str, extra_info):
  return float(len(extra_info))


def no_score(solution_str):
  return {"acc": 1.0}
"""
OTHERS = """
import asyncio

async def later(completions, **kwargs):
  return [1.0] * len(completions)

class Later:
  async def __call__(self, completions, **kwargs):
    return [1.0]
later_object = Later()

def trl_and_verl(completions, solution_str):
  return 1.0

def trl_and_own(prompts, completions, example):
  return 1.0

def own_and_verl(prompt, completion, example, *, solution_str=""):
  return 1.0

def anything(**kwargs):
  return 1.0

def batched(data_sources, solution_strs, ground_truths, extra_infos):
  return [1.0]

def trl_only(completion_ids):
  return [1.0]

def by_place(completions, /, **kwargs):
  return [1.0]

def columns(completions, answer, level, bonus=0, **kwargs):
  return [level_ + bonus for level_ in level]

def needs_all(data_source, solution_str, ground_truth, server):
  return 1.0
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("rewards")
  for name, code in {"trl": TRL, "verl": VERL, "others": OTHERS}.items():
    (folder / f"{name}.py").write_text(code)
  return {name: f"{folder / name}.py" for name in ("trl", "verl", "others")}


def computed(names, examples, texts, workers=0, options=None, **keywords):
  """Values [B, G] of each function, and all that `groups` gives."""
  lengths = np.array([[len(t) + 1 for t in group] for group in texts])
  ids = np.arange(lengths.size * 9).reshape(*lengths.shape, 9)
  examples = [{"prompt_text": "text"} | e for e in examples]
  given = examples, texts, lengths, lengths > 0, 9, ids
  with Pool(names, options, workers=workers, **keywords) as pool:
    result = pool.collect([groups.submit_groups(pool, *given)])
  return list(result.values.values()), result


@pytest.mark.parametrize("workers", [0, 1])
def test_trl_functions_of_text(files, workers):
  names = ["reward_func", "correct_func", "math_reward_func", "seen"]
  example = {"prompt": "What?", "ground_truth": "9", "answer": "7"}
  examples = [example | {"task": "math"}, example | {"task": "code"}]
  texts = [[r"\boxed{9}", "right", ""], ["a", r"a \boxed{8}", "right"]]
  names = [f"{files['trl']}:{name}" for name in names]
  found, result = computed([*names, "unfinished"], examples, texts, workers)
  lengths = [[10, 6, 1], [2, 12, 6]]
  lengths = np.minimum(lengths, 9)  # there are no more ids here
  np.testing.assert_array_equal(found[0], lengths)
  np.testing.assert_array_equal(found[1], [[1, 0, 0], [0, 0, 0]])
  nan = math.nan
  np.testing.assert_array_equal(found[2], [[-1, 1, -1], [nan] * 3])
  np.testing.assert_array_equal(found[3], [[0, 1, 2]] * 2)
  np.testing.assert_array_equal(
    result.rewards, np.nansum(found, axis=0).astype(np.float32)
  )
  assert not result.failed.any() and result.extras == {}


def test_trl_functions_of_conversations(files):
  """And what they log."""
  prompt = [{"role": "user", "content": "What?"}]
  texts = [["<think>a</think><answer>b</answer>", "no"]]
  state = {"global_step": 3, "max_steps": 12}
  example = {"prompt": prompt, "trainer_state": state}
  names = [f"{files['trl']}:{n}" for n in ("format_reward_func", "state_func")]
  found, _ = computed(names, [example], texts)
  np.testing.assert_array_equal(found, [[[1, 0]], [[0.25, 0.25]]])
  plain = [{"prompt": "p"}, {"prompt": "q"}]
  texts = [["1", "333"], ["55555", "5555555"]]
  found, result = computed([f"{files['trl']}:metric_func"], plain, texts, 1)
  np.testing.assert_array_equal(found, np.full((1, 2, 2), 0.5))
  assert list(result.extras) == ["metric_func/mean_length"]
  np.testing.assert_array_equal(
    result.extras["metric_func/mean_length"], [[2, 2], [6, 6]]
  )


def test_names_of_the_convention_in_the_data_and_in_calls(files):
  """A column of the data may have any name, and any type."""
  example = {"prompt": "?", "trainer_state": None, "extra_info": '{"a": 1}'}

  def result(name):
    name = f"{files['verl']}:{name}"
    return computed([name], [example], [["a", "b"]])[1]

  named = result("by_names")
  assert named.rewards.tolist() == [[1, 1]]
  numbers = {name: x.tolist() for name, x in named.extras.items()}
  assert numbers == {"by_names/named": [[2, 2]], "by_names/other": [[3, 3]]}
  one = result("large")
  assert one.failed.tolist() == [[True, False]]
  assert one.rewards[0, 1] == 1 and not one.extras
  [[(failure,), _]] = result("unordered").failures
  assert "it returned set, no list of rewards" in failure.reason
  assert result("info").rewards.tolist() == [[8, 8]]


@pytest.mark.parametrize("workers", [0, 1])
def test_verl_functions(files, workers):
  texts = [["#### 12", "12", "#### 13"]]
  data = {"data_source": "openai/gsm8k", "extra_info": {"index": 3}}
  data |= {"reward_model": {"style": "rule", "ground_truth": "12"}}
  names = [f"{files['verl']}:{name}" for name in ("gsm8k", "compute_score")]
  options = {"gsm8k": {"format_score": 0.1}}
  found, result = computed(
    names, [data | {"answer": "x"}], texts, workers, options
  )
  np.testing.assert_allclose(found, [[[1, 0, 0.1]], [[1, 0, 0]]], rtol=1e-6)
  extras = {
    "compute_score/acc": [[1, 0, 0]],
    "compute_score/length": [[7, 2, 7]],
  }
  assert {k: v.tolist() for k, v in result.extras.items()} == extras
  typed = {"answer": 12, "extra_info": {"a": 1.0, "b": True, "c": "1"}}
  found, _ = computed([f"{files['verl']}:types"], [typed], texts, workers)
  assert found[0].all()
  plain = {"answer": "12", "data_source": "x"}
  names = [f"{files['verl']}:{name}" for name in ("gsm8k", "everything")]
  found, _ = computed(names, [plain], texts)
  np.testing.assert_array_equal(found, [[[1, 0, 0]], [[1, 1, 1]]])
  _, result = computed([f"{files['verl']}:no_score"], [plain], texts)
  [failure, *_] = groups.all_failures(result)
  assert result.failed.all() and "a dict without 'score'" in failure.reason


@pytest.mark.parametrize(
  "how, reason",
  [
    ("short", "returned 1 rewards for 3 completions"),
    ("number", "raised TypeError: it returned float, no list"),
    ("raises", "raised RuntimeError: no idea (trl.py:"),
  ],
)
def test_what_fails_in_a_group_is_of_all_of_it(files, how, reason):
  odd, good = f"{files['trl']}:odd", f"{files['verl']}:gsm8k"
  options = {"odd": {"how": how}}
  example = {"answer": "1"}
  _, result = computed([good, odd], [example], [["a", "b", "c"]], 0, options)
  assert result.failed.all() and np.isnan(result.rewards).all()
  failures = groups.all_failures(result)
  assert [f.completion for f in failures] == ["a", "b", "c"]
  assert all(f.function == "odd" for f in failures)
  assert all(f.reason.startswith(reason) for f in failures), failures


def test_what_fails_of_one_completion_is_its_own(files):
  options = {"odd": {"how": "values"}}
  given = [{"answer": "1"}], [["a", "b", "c"]], 0, options
  _, result = computed([f"{files['trl']}:odd"], *given)
  np.testing.assert_array_equal(result.rewards, [[1, math.nan, math.nan]])
  reasons = [f.reason for f in groups.all_failures(result)]
  assert reasons == ["returned nan", "returned str, which is not a number"]


@pytest.mark.slow
@pytest.mark.parametrize(
  "workers, how, reason",
  [
    (0, "hangs", "no result after 0.6 s"),
    (1, "hangs", "no result after 0.6 s"),
    (1, "exits", "ended its process with code"),
  ],
)
def test_a_group_that_is_lost_has_a_limit_of_its_size(
  files, workers, how, reason
):
  """The others, and what other functions say of the same, are not."""
  odd, good = f"{files['trl']}:odd", f"{files['verl']}:gsm8k"
  after = f"{files['trl']}:metric_func"
  names, options = [odd, good, after], {"odd": {"how": how}}
  given = [{"answer": "1"}], [["a", "b", "#### 1"]], workers, options
  found, result = computed(names, *given, timeout=0.2)
  assert result.failed.all()
  assert all(f.reason.startswith(reason) for f in groups.all_failures(result))
  np.testing.assert_array_equal(found[1], [[0, 0, 1]])
  assert np.isnan(found[2]).all()


def test_data_sets_of_a_mixture_that_a_function_is_not_for(files):
  name = f"{files['trl']}:metric_func"
  sources = {"metric_func": ["easy"]}
  examples = [{"data_source": "easy"}, {"data_source": "hard"}]
  texts = [["a", "b"], ["c", "d"]]
  found, result = computed([name], examples, texts, sources=sources)
  np.testing.assert_array_equal(found[0], [[0.5] * 2, [math.nan] * 2])
  assert not result.failed.any()


@pytest.mark.parametrize(
  "name, message",
  [
    ("later", "later' is asynchronous.*write `def`"),
    ("later_object", "is asynchronous"),
    ("trl_and_verl", r"'completions' \(TRL's\) and 'solution_str' \(verl's\)"),
    ("trl_and_own", r"'prompts' \(TRL's\) and 'example' \(grpojax's own\)"),
    ("own_and_verl", r"'solution_str' \(verl's\) and 'prompt'.*rename one"),
    ("anything", "known by a parameter `completions`, verl's by"),
    ("batched", "missing a required argument: 'extra_infos'.*`solution_str`"),
    ("by_place", "TRL's convention passes all by keywords"),
  ],
)
def test_what_follows_no_convention_is_refused(files, name, message):
  name = f"{files['others']}:{name}"
  with pytest.raises(ValueError, match=message):
    functions.resolve(name)


@pytest.mark.parametrize(
  "file, name, options",
  [
    ("trl", "odd", {"completions": 1}),
    ("verl", "gsm8k", {"metod": 1}),
    ("verl", "gsm8k", {"solution_str": ""}),
  ],
)
def test_options_are_checked(files, file, name, options):
  (option,) = options
  with pytest.raises(ValueError, match=f"no option '{option}': it takes .'"):
    functions.resolve(f"{files[file]}:{name}", options)


def test_missing_columns_are_named(files):
  def check(name, example, **options):
    name = f"{files['others']}:{name}"
    reward = functions.resolve(name, options)
    conventions.check_columns(name, reward, example, "data set 'mine'")

  example = {"prompt": "p", "answer": "1"}
  check("columns", example | {"level": 2})
  check("columns", example, level=[1])
  message = (
    "columns' needs 'level', and data set 'mine' has only answer, prompt: add "
    "that column, or give it one value by reward.options.columns.level=..."
  )
  with pytest.raises(ValueError) as caught:
    check("columns", example)
  assert message in str(caught.value)
  with pytest.raises(ValueError, match="needs 'data_source', and data set"):
    check("needs_all", example, server="x")
  with pytest.raises(ValueError, match="needs 'server', and data set"):
    check("needs_all", example, data_source="x")
  check("needs_all", example, data_source="x", server="y")
  functions.resolve("exact_answer")  # needs nothing that is looked for
  conventions.check_columns("e", functions.resolve("exact_answer"), {}, "")


def test_ids_and_steps_are_brought_only_where_they_are_wanted(files):
  def wants(name, what):
    with Pool([name]) as pool:
      return pool.wants(what)

  for name, ids, state in (
    ("exact_answer", False, False),
    (f"{files['verl']}:everything", False, False),
    (f"{files['trl']}:reward_func", True, True),
    (f"{files['others']}:trl_only", True, False),
  ):
    assert wants(name, conventions.IDS) == ids, name
    assert wants(name, conventions.STATE) == state, name


def test_trls_own_functions():
  """Where TRL is installed, its rewards agree with a direct call of them."""
  pytest.importorskip("trl.rewards")
  from trl.rewards import think_format_reward

  prompt = [{"role": "user", "content": "?"}]
  texts = ["<think>\nI.\n</think>\nA.", "<think>\nI.\nA."]
  with Pool(["trl.rewards:think_format_reward"]) as pool:
    group = [("?", text, {"prompt": prompt}) for text in texts]
    found = pool.collect([pool.submit([group], 2)]).rewards[0].tolist()
  assert found == think_format_reward([[{"content": t}] for t in texts])
  assert "trl" in sys.modules
