"""Reward functions written for TRL and verl run unchanged.

The examples are from TRL 1.16 (docs/source/grpo_trainer.md, rewards/) and
verl 0.9.1 (utils/reward_score/gsm8k.py, its guide to reward functions).
"""

import math
import sys

import numpy as np
import pytest

from grpojax.rewards import conventions, functions
from grpojax.rewards.pool import Pool, all_failures, submit_groups

TRL = """
import re

def reward_func(completion_ids, **kwargs):
  return [float(len(ids)) for ids in completion_ids]

def format_reward_func(completions, **kwargs):
  pattern = r"^<think>.*?</think><answer>.*?</answer>$"
  completion_contents = [completion[0]["content"] for completion in completions]
  matches = [re.match(pattern, content) for content in completion_contents]
  return [1.0 if match else 0.0 for match in matches]

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
  if how == "raises":
    raise RuntimeError("no idea")
  if how == "hangs":
    re.fullmatch("(a*)*b", "a" * 60)
  if how == "exits":
    import os
    os._exit(3)
  values = {"b": float("nan"), "c": "x"}
  return [values.get(c, 1) for c in completions]
"""
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

def unordered(completions):
  return {2.0, 1.0}

def info(solution_str, extra_info):
  return float(len(extra_info))

def no_score(solution_str):
  return {"acc": 1.0}
"""
OTHERS = """
async def later(completions, **kwargs): pass
class Later:
  async def __call__(self, completions, **kwargs): pass
later_object = Later()
def trl_and_verl(completions, solution_str): pass
def trl_and_own(prompts, completions, example): pass
def own_and_verl(prompt, completion, example, *, solution_str=""): pass
def anything(**kwargs): pass
def single(text): pass
def batched(data_sources, solution_strs, ground_truths, extra_infos): pass
def by_place(completions, /, **kwargs): pass
def columns(completions, answer, level, bonus=0, **kwargs): pass
def needs_all(data_source, solution_str, ground_truth, server): pass
"""
FILES = {"trl": TRL, "verl": VERL, "others": OTHERS}
NAN = math.nan


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("rewards")
  for name, code in FILES.items():
    (folder / f"{name}.py").write_text(code)
  return folder


def named(files, *names):
  """Returns paths of functions: files/trl.py:f for "trl:f"."""
  pairs = [name.partition(":") for name in names]
  return [f"{files / f}.py:{n}" if f in FILES else f for f, _, n in pairs]


@pytest.fixture
def computed(files):
  """A function that returns the values [B, G] by function, and the result."""

  def computed(names, examples, texts, workers=0, options=None, **keywords):
    lengths = np.array([[len(t) + 1 for t in group] for group in texts])
    ids = np.arange(lengths.size * 9).reshape(*lengths.shape, 9)
    examples = [{"prompt_text": "text"} | e for e in examples]
    arrays = lengths, lengths > 0, 9, ids
    names = named(files, *names)
    with Pool(names, options, workers=workers, **keywords) as pool:
      sent = submit_groups(pool, examples, texts, *arrays)
      result = pool.collect([sent])
    return [x.tolist() for x in result.values.values()], result

  return computed


def equal(values, expected):
  np.testing.assert_array_equal(np.array(values), np.array(expected, float))


@pytest.mark.parametrize("workers", [0, 1])
def test_trl_functions_on_texts(computed, workers):
  names = ("reward_func", "math_reward_func", "seen")
  names = [*(f"trl:{name}" for name in names), "unfinished"]
  example = {"prompt": "What?", "answer": "7"}
  examples = [example | {"task": "math"}, example | {"task": "code"}]
  texts = [[r"\boxed{9}", "right", ""], ["a", r"a \boxed{8}", "right"]]
  values, result = computed(names, examples, texts, workers)
  equal(values[0], [[9, 6, 1], [2, 9, 6]])  # the ids have 9 columns
  equal(values[1], [[-1, 1, -1], [NAN] * 3])
  equal(values[2], [[0, 1, 2]] * 2)
  equal(result.rewards, np.nansum(values, axis=0).astype(np.float32))
  assert not result.failed.any() and result.extras == {}


def test_trl_functions_on_chats_and_their_logs(computed):
  prompt = [{"role": "user", "content": "What?"}]
  texts = [["<think>a</think><answer>b</answer>", "no"]]
  state = {"global_step": 3, "max_steps": 12}
  example = {"prompt": prompt, "trainer_state": state}
  names = ["trl:format_reward_func", "trl:state_func"]
  values, _ = computed(names, [example], texts)
  equal(values, [[[1, 0]], [[0.25, 0.25]]])
  plain = [{"prompt": "p"}, {"prompt": "q"}]
  texts = [["1", "333"], ["55555", "5555555"]]
  values, result = computed(["trl:metric_func"], plain, texts, 1)
  equal(values, np.full((1, 2, 2), 0.5))
  assert list(result.extras) == ["metric_func/mean_length"]
  equal(result.extras["metric_func/mean_length"], [[2, 2], [6, 6]])


def test_data_columns_may_have_reserved_names(computed):
  example = {"prompt": "?", "trainer_state": None, "extra_info": '{"a": 1}'}
  result = lambda name: computed([f"verl:{name}"], [example], [["a", "b"]])[1]
  by_names = result("by_names")
  equal(by_names.rewards, [[1, 1]])
  numbers = {name: x.tolist() for name, x in by_names.extras.items()}
  assert numbers == {"by_names/named": [[2, 2]], "by_names/other": [[3, 3]]}
  equal(result("info").rewards, [[8, 8]])


@pytest.mark.parametrize("workers", [0, 1])
def test_verl_functions(computed, workers):
  texts = [["#### 12", "12", "#### 13"]]
  data = {"data_source": "openai/gsm8k", "extra_info": {"index": 3}}
  data |= {"reward_model": {"style": "rule", "ground_truth": "12"}}
  names = ["verl:gsm8k", "verl:compute_score"]
  options = {"gsm8k": {"format_score": 0.1}}
  example = data | {"answer": "x"}
  values, result = computed(names, [example], texts, workers, options)
  np.testing.assert_allclose(values, [[[1, 0, 0.1]], [[1, 0, 0]]], rtol=1e-6)
  extras = {"acc": [[1, 0, 0]], "length": [[7, 2, 7]]}
  assert {k: v.tolist() for k, v in result.extras.items()} == {
    f"compute_score/{name}": values for name, values in extras.items()
  }
  plain = {"answer": "12", "data_source": "x"}
  values, _ = computed(["verl:gsm8k", "verl:everything"], [plain], texts)
  equal(values, [[[1, 0, 0]], [[1, 1, 1]]])


@pytest.mark.parametrize(
  "name, how, reason",
  [
    ("trl:odd", "short", "returned 1 rewards for 3 completions"),
    ("trl:odd", "raises", "raised RuntimeError: no idea (trl.py:"),
    ("verl:unordered", "", "raised TypeError: returned set instead of a list"),
    ("verl:no_score", "", "returned a dict without 'score'"),
  ],
)
def test_a_failed_call_fails_the_whole_group(computed, name, how, reason):
  options = {"odd": {"how": how}} if how else {}
  arguments = [{"answer": "1"}], [["a", "b", "c"]], 0, options
  _, result = computed(["verl:gsm8k", name], *arguments)
  assert result.failed.all() and np.isnan(result.rewards).all()
  failures = all_failures(result)
  assert [f.completion for f in failures] == ["a", "b", "c"]
  assert all(f.function == name.partition(":")[2] for f in failures)
  assert all(f.reason.startswith(reason) for f in failures), failures


@pytest.mark.slow
@pytest.mark.parametrize(
  "workers, how, reason",
  [
    (0, "hangs", "no result after 0.6 s"),
    (1, "hangs", "no result after 0.6 s"),
    (1, "exits", "ended its process with code"),
  ],
)
def test_the_time_limit_of_a_group_is_times_its_size(
  computed, workers, how, reason
):
  """Functions called before it have values, functions after it have none."""
  names = ["trl:odd", "verl:gsm8k", "trl:metric_func"]
  options = {"odd": {"how": how}}
  arguments = [{"answer": "1"}], [["a", "b", "#### 1"]], workers, options
  values, result = computed(names, *arguments, timeout=0.2)
  assert result.failed.all()
  assert all(f.reason.startswith(reason) for f in all_failures(result))
  equal(values[1:], [[[0, 0, 1]], [[NAN] * 3]])


def test_single_failures_and_functions_for_other_data_sets(computed):
  examples = [{"data_source": "easy"}, {"data_source": "hard"}]
  settings = {"options": {"odd": {"how": "values"}}}
  settings |= {"sources": {"odd": ["easy"]}}
  texts = [["a", "b", "c"]] * 2
  values, result = computed(["trl:odd"], examples, texts, **settings)
  equal(values, [[[1, NAN, NAN], [NAN] * 3]])
  equal(result.failed, [[0, 1, 1], [0] * 3])
  reasons = [f.reason for f in all_failures(result)]
  assert reasons == ["returned nan", "returned str, which is not a number"]


@pytest.mark.parametrize(
  "name, options, message",
  [
    ("others:later", {}, "later' is asynchronous.*write `def`"),
    ("others:later_object", {}, "is asynchronous"),
    ("others:trl_and_verl", {}, r"s' \(TRL's\) and 'solution_str' \(verl's\)"),
    ("others:trl_and_own", {}, r"s' \(TRL's\) and 'example' \(grpojax's own\)"),
    ("others:own_and_verl", {}, r"str' \(verl's\) and 'prompt'.*rename one"),
    ("others:anything", {}, "parameter `completions`, functions for verl"),
    ("others:single", {}, "with prompt, completion, example: too many"),
    ("others:batched", {}, "missing a .*: 'extra_infos'.*`solution_str`"),
    ("others:by_place", {}, "positional-only.* TRL's convention passes key"),
    ("trl:odd", {"completions": 1}, "no option 'completions': its options"),
    ("verl:gsm8k", {"metod": 1}, "no option 'metod': its options are .'"),
    ("verl:gsm8k", {"solution_str": ""}, "no option 'solution_str': its opt"),
  ],
)
def test_functions_of_no_convention_are_refused(files, name, options, message):
  with pytest.raises(ValueError, match=message):
    functions.resolve(*named(files, name), options)


@pytest.mark.parametrize(
  "name, options, columns, missing",
  [
    ("columns", {}, {"answer": "1", "level": 2}, None),
    ("columns", {"level": [1]}, {"answer": "1"}, None),
    ("columns", {}, {"answer": "1"}, "level"),
    ("needs_all", {"server": "x"}, {"answer": "1"}, "data_source"),
    ("needs_all", {"data_source": "x", "server": "y"}, {"answer": "1"}, None),
    ("exact_answer", {}, {}, None),  # our convention is not checked
  ],
)
def test_missing_columns_are_named(files, name, options, columns, missing):
  (path,) = named(files, f"others:{name}") if columns else (name,)
  reward = functions.resolve(path, options)
  check = lambda: conventions.check_columns(path, reward, columns, "set 'mine'")
  if missing is None:
    return check()
  advice = f"reward.options.{name}.{missing}=..."
  needs = f"{name}' needs {missing!r}, but set 'mine' has only answer: .*"
  with pytest.raises(ValueError, match=needs + advice):
    check()


def test_trls_own_functions_agree_with_direct_calls():
  pytest.importorskip("trl.rewards")
  from trl.rewards import think_format_reward

  prompt = [{"role": "user", "content": "?"}]
  texts = ["<think>\nI.\n</think>\nA.", "<think>\nI.\nA."]
  with Pool(["trl.rewards:think_format_reward"]) as pool:
    group = [("?", text, {"prompt": prompt}) for text in texts]
    values = pool.collect([pool.submit([group], 2)]).rewards[0].tolist()
  assert values == think_format_reward([[{"content": t}] for t in texts])
  assert "trl" in sys.modules
