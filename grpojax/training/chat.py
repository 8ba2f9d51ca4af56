"""Answers of a model to prompts, and talks with it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax.core.types import Params
from grpojax.environments.pool import EnvironmentPool
from grpojax.runtime.terminal.screen import printable
from grpojax.training import policy as policy_lib
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.policy import Policy
from grpojax.training.report import sample_rows
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib

NEW, QUIT = "/new", "/quit"
HELP = f"a line is a prompt; {NEW} forgets what was said, {QUIT} ends"

Prompt = str | list[dict[str, str]]


class Answer(NamedTuple):
  """A completion."""

  text: str  # as the model wrote it
  tokens: int  # number of its tokens, with the one that ends it
  finished: bool  # True if it came to its end within sampling.max_new_tokens
  # Its reward, nan where it could not be computed; None without.
  reward: float | None = None
  before: tuple[str, ...] = ()  # turns before, and what an environment said
  error: str | None = None  # why the environment failed


class Speaker(NamedTuple):
  """A model that answers."""

  settings: TrainSettings  # settings of its data, sampling and rewards
  policy: Policy  # the model
  params: Params  # its parameters
  # Sampler of its answers, from `step.sampling.make_sampler`.
  sampler: Callable[..., Any]
  key: jax.Array  # random key of the samples


def speaker(
  settings: TrainSettings,
  policy: Policy,
  params: Params,
  samples: int,
  greedy: bool,
  environment: EnvironmentPool | None = None,
) -> Speaker:
  """Makes a model answer, by samples or by its likeliest tokens (`greedy`)."""
  sampling = settings.sampling.distribution
  if greedy:
    sampling = dataclasses.replace(sampling, temperature=0.0)
  sampler = sampling_lib.make_sampler(
    settings, policy, samples, sampling, environment=environment
  )
  return Speaker(
    settings, policy, params, sampler, jax.random.key(settings.seed)
  )


def _with_room(settings: TrainSettings, tokens: int) -> TrainSettings:
  """Doubles data.max_prompt_length until a prompt fits: few sizes compile."""
  length = settings.data.max_prompt_length or 32
  while length < tokens:
    length *= 2
  data = dataclasses.replace(settings.data, max_prompt_length=length)
  return dataclasses.replace(settings, data=data)


def ask(
  speaker: Speaker,
  example: dict[str, Any],
  turn: int = 0,
  reward_pool: rewards_lib.RewardPool | None = None,
) -> tuple[str, list[Answer]]:
  """Asks a model the "prompt" of an example; another turn draws other samples.

  Returns:
    The prompt as the model reads it, and the answers.

  Raises:
    ValueError: the model's chat template does not take the prompt.
  """
  settings, policy = speaker.settings, speaker.policy
  _, ids = prompts_lib.encoder(settings, policy)(example["prompt"])
  settings = _with_room(settings, len(ids))
  prompts, examples = prompts_lib.prompts_of(settings, policy, [example], [0])
  key = jax.random.fold_in(speaker.key, turn)
  sampled = speaker.sampler(
    speaker.params, prompts_lib.trim(prompts), examples, key
  )
  samples = sampled.rollout
  if reward_pool is None:
    texts = policy_lib.decode(policy, samples)
    rewards = [None] * len(texts[0])
  else:
    texts, scores = rewards_lib.compute_rewards(
      policy, reward_pool, examples, sampled
    )
    rewards = scores.rewards[0].tolist()
  tokens = np.sum(samples.completion_mask[0], axis=-1).tolist()
  finished = np.asarray(samples.finished[0]).tolist()
  answers = [*map(Answer, texts[0], tokens, finished, rewards)]
  if sampled.transcripts is not None:
    own = samples.completion_ids, samples.completion_mask, samples.turns
    arrays = *own, samples.turn_rewards
    names = "ids", "mask", "turns", "turn_rewards"
    for g, row in enumerate(sampled.transcripts[0]):
      one = {k: np.asarray(x[0, g]) for k, x in zip(names, arrays, strict=True)}
      *blocks, _ = sample_rows.turns_of(policy.tokenizer, one)
      before = tuple(f"{x['by']}: {x['text'].strip()}" for x in blocks)
      answers[g] = answers[g]._replace(
        before=before, error=row["episode_error"]
      )
  return examples[0]["prompt_text"], answers


def lines(answers: list[Answer]) -> list[str]:
  """Lines of answers, to print: control characters are escaped."""
  texts = []
  for i, answer in enumerate(answers, 1):
    about = [f"[{i}/{len(answers)}]"] if len(answers) > 1 else []
    if answer.reward is not None:
      about.append(f"reward {answer.reward:g}")
    about.append(f"{answer.tokens} tokens")
    if not answer.finished:
      about.append("cut off there")
    if answer.error:
      about.append(f"the environment failed: {printable(answer.error)}")
    texts += map(printable, answer.before)
    texts += [printable(answer.text).rstrip(), f"  ({', '.join(about)})"]
  return texts


def talk(
  speaker: Speaker, read: Iterator[str], say: Callable[[str], None], turns: bool
) -> None:
  """Answers one line after another, to their end or `QUIT`.

  With `turns`, which need a chat template, the model is shown the lines and
  the first answer to each before.
  """
  history: list[dict[str, str]] = []
  for turn, line in enumerate(read):
    text = line.strip()
    if text == QUIT:
      return
    if text == NEW:
      history = []
    elif text:
      user = {"role": "user", "content": text}
      prompt: Prompt = [*history, user] if history else text
      try:
        _, answers = ask(speaker, {"prompt": prompt}, turn)
      except ValueError as error:
        say(printable(f"error: {error}"))  # may quote the model's template
        continue
      say("\n".join(lines(answers)))
      if turns:
        answer = {"role": "assistant", "content": answers[0].text}
        history = [*history, user, answer]
