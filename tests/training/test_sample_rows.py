"""Rows of samples.jsonl and rewards.jsonl from handmade arrays."""

import pathlib

import numpy as np
import pytest

from grpojax.core.packing import layout as packing_layout
from grpojax.core.rows import take
from grpojax.core.types import Batch, Rollout
from grpojax.rewards.pool import GroupRewards
from grpojax.runtime.text import tokenization
from grpojax.training.policies import Policy
from grpojax.training.step import sample_rows
from grpojax.training.step.draws import Draw
from grpojax.training.step.extension import Drawn, StepResult

B = 3
G = 2
T = 4


class Spaced:
  """Drops the space before the first word, like sentencepiece."""

  WORDS = ["<end>", "a", "b", "\ufffd", "!"]

  def decode(self, ids, **_):
    return " ".join(self.WORDS[i] for i in ids)


@pytest.fixture
def case(tiny):
  ids = np.array([[[1, 2, 0, 4], [2, 1, 4, 4]]] * B)
  mask = np.array([[[1, 1, 1, 0], [1, 1, 1, 1]]] * B, bool)
  finished = np.array([[True, False]] * B)
  logprobs = -np.arange(B * G * T, dtype=np.float32).reshape(B, G, T) / 7
  rewards = np.array([[1, 0], [2, np.nan], [3, 3], [4, 5]], np.float32)
  scores = GroupRewards(
    rewards, {"f": rewards / 2, "g": rewards}, rewards < 0, [[(), ()]] * 4
  )
  prompts = {"prompt_ids": None, "prompt_mask": None}
  tokens = {"completion_ids": ids, "completion_mask": mask}
  samples = Rollout(**prompts, **tokens, finished=finished, logprobs=logprobs)
  # The batch has the first, last and third of four drawn groups.
  examples = [{"prompt_text": f"p{i}", "answer": str(i)} for i in (0, 3, 2)]
  draw = Draw(samples, take(scores, [0, 3, 2]), examples)
  batch = Batch(
    **prompts,
    **tokens,
    advantages=np.array([[0.5, -0.5], [1, -1], [0, 0]], np.float32),
    ref_logprobs=logprobs - 1,
    old_logprobs=logprobs + 2,
  )
  policy = Policy(pathlib.Path(), tiny.lm, Spaced(), (0,), 0)
  drawn = Drawn(draw, scores, examples, None)
  return policy, StepResult(None, {}, drawn, batch)


def test_rows_are_whole_groups_of_the_batch(case, settings_with):
  rows = sample_rows.of_step(settings_with(log__sample_groups=2), *case)
  assert {name: [row[name] for row in rows] for name in rows[0]}.items() >= {
    "group": [0, 0, 1, 1],
    "prompt": ["p0", "p0", "p3", "p3"],
    "answer": ["0", "0", "3", "3"],
    "reward": [1, 0, 4, 5],
    "advantage": [0.5, -0.5, 1, -1],
    "truncated": [False, True, False, True],
  }.items()
  assert [row["rewards"]["f"] for row in rows] == [0.5, 0, 2, 2.5]
  first, second = rows[:2]
  assert first["completion"] == "a b" and second["completion"] == "b a ! !"
  assert first["tokens"] == ["a", " b", " <end>"]
  assert second["tokens"] == ["b", " a", " !", " !"]
  assert first["logprobs"] == pytest.approx([0, -1 / 7, -2 / 7], abs=1e-4)
  assert first["ref_logprobs"] == pytest.approx([-1, -8 / 7, -9 / 7], abs=1e-4)
  assert "trainer_logprobs" not in first  # equal to the sampler's


def test_trainer_logprobs_are_recorded_without_a_reference(case, settings_with):
  policy, result = case
  settings = settings_with(
    log__sample_groups=9, loss__old_logprobs="trainer", optim__minibatches=2
  )
  result = result._replace(batch=result.batch.replace(ref_logprobs=None))
  rows = sample_rows.of_step(settings, policy, result)
  assert len(rows) == B * G
  numbers = [2, 2 - 1 / 7, 2 - 2 / 7]
  assert rows[0]["trainer_logprobs"] == pytest.approx(numbers, abs=1e-4)
  assert "ref_logprobs" not in rows[0]
  assert rows[-1]["reward"] == 3 and rows[-1]["advantage"] == 0


def test_missing_numbers_are_none(case, settings_with):
  policy, result = case
  every = result.drawn.rewards
  draw = result.drawn.batch._replace(rewards=take(every, [1, 3, 2]))
  lengths = np.array([[3, 0], [3, 1], [0, 0]])
  layout = packing_layout.plan(lengths, T, np.ones(B, int), 1)
  result = result._replace(
    drawn=result.drawn._replace(batch=draw),
    batch=result.batch.replace(packing=layout),
  )
  settings = settings_with(log__sample_groups=9)
  rows = sample_rows.of_step(settings, policy, result)
  present = [None not in row["ref_logprobs"] for row in rows]
  assert present == [True, False, True, True, False, False]
  assert rows[1]["ref_logprobs"] == [None] * 4
  assert None not in rows[1]["logprobs"]
  assert rows[1]["reward"] is None
  assert rows[1]["rewards"] == {"f": None, "g": None}


def test_token_texts_join_to_the_text():
  characters = tokenization.character_tokenizer()
  ids = characters.encode("12 + 3\n\n= 15")
  texts = sample_rows.token_texts(characters, ids)
  assert "".join(texts) == "12 + 3\n\n= 15" and len(texts) == len(ids)
  assert sample_rows.token_texts(characters, []) == []


def test_rewards_are_counted_by_value_or_in_bins():
  rewards = np.array([[1, 0, 1], [0.25, np.nan, -np.inf]], np.float32)
  assert sample_rows.reward_counts(rewards) == [(0, 1), (0.25, 1), (1, 2)]
  assert sample_rows.reward_counts(np.full((2, 2), np.nan, np.float32)) == []
  rewards = np.linspace(0, 8, 64, dtype=np.float32).reshape(8, 8)
  values, counts = zip(*sample_rows.reward_counts(rewards, bins=8), strict=True)
  assert values == pytest.approx(np.arange(8) + 0.5)
  assert counts == (8,) * 8
