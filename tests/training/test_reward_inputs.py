"""Inputs of reward functions in a run: columns, tokens, the step."""

import pytest

from grpojax.data.examples import SOURCE
from grpojax.runtime.files import records
from grpojax.training.config import default_config, from_config
from grpojax.training.data import splits
from grpojax.training.step import scoring

REWARDS = """
def how_far(prompts, completions, completion_ids, trainer_state, answer):
  assert set(answer) == {"7"} and len(set(prompts)) == 1
  assert all(len(ids) >= 1 for ids in completion_ids)
  return [trainer_state.global_step / trainer_state.max_steps for _ in prompts]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  right = solution_str.strip().endswith(ground_truth)
  return {"score": float(right), "length": len(solution_str)}

def of_level(completions, level, **kwargs):
  return level
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(REWARDS)
  return path


def test_each_data_set_needs_the_columns_of_its_rewards(file):
  config = default_config()
  config.reward.functions = (f"{file}:of_level", f"{file}:compute_score")
  config.reward.weights = (1.0, 1.0)
  config.data.mixture.easy = {"name": "jsonl", "rewards": "compute_score"}
  config.data.mixture.hard = {"name": "jsonl", "rewards": "of_level"}
  settings = from_config(config)
  rewards = scoring.resolve_functions(settings)

  def check(easy, hard):
    columns = {"easy": easy, "hard": hard}
    parts = {
      name: splits.Split([{"prompt": "p"} | extra])
      for name, extra in columns.items()
    }
    whole = splits.Split(None, parts=parts)
    scoring.check_columns(settings, rewards, whole)

  # Examples of a mixture have verl's data_source.
  check({"answer": "1"}, {"level": 1})
  with pytest.raises(ValueError, match=f"'hard' has only answer, {SOURCE}, pr"):
    check({"answer": "1"}, {"answer": "1"})
  with pytest.raises(ValueError, match="'ground_truth', but data set 'easy'"):
    check({}, {"level": 1})


def test_a_missing_column_is_refused_at_the_start(train_toy, file, tmp_path):
  with pytest.raises(SystemExit, match="needs 'level', but data set 'arithm"):
    train_toy(reward__functions=f"{file}:of_level")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_trl_and_verl_rewards_and_a_length_penalty(
  train_toy, file, tmp_path
):
  functions = f"{file}:compute_score,{file}:how_far"
  rewards = {"reward.functions": functions, "reward.weights": "1,1"}
  rewards |= {"reward.options.compute_score.data_source": "toy"}
  rewards |= {"reward.length_penalty": 0.5, "reward.workers": 1}
  rows = train_toy(**rewards, steps=2, eval__every=2)
  rows = [row for row in rows if "loss" in row]
  assert [row["rewards/how_far/mean"] for row in rows] == [0.0, 0.5]
  for row in rows:
    assert row["reward_failures"] == 0
    assert 1 < row["logged/compute_score/length"] < 9
    assert 0 < row["rewards/compute_score/mean"] < 1
    assert 0 < row["length_penalty_mean"] <= 0.5
  for sample in records.read_jsonl(tmp_path / "run" / "samples.jsonl"):
    assert sample["reward"] < sum(sample["rewards"].values())
