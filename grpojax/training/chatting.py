"""A model is asked, and what it answers is shown."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.types import Params
from grpojax.runtime.screen import printable
from grpojax.training import from_config, samplers, scored_text
from grpojax.training import policy as policy_lib
from grpojax.training import prompts as prompts_lib
from grpojax.training.policy import Policy
from grpojax.training.scoring import RewardPool

NEW, QUIT = "/new", "/quit"
HELP = f"a line is a prompt; {NEW} forgets what was said, {QUIT} ends"

Prompt = str | list[dict[str, str]]


class Answer(NamedTuple):
  """A completion.

  Attributes:
    text: as the model wrote it.
    tokens: that it took, with the one that ends it.
    finished: whether it came to its end within sampling.max_new_tokens.
    reward: nan where it could not be computed; None where nobody asks.
  """

  text: str
  tokens: int
  finished: bool
  reward: float | None = None


class Speaker(NamedTuple):
  """A model that answers.

  Attributes:
    config: its data, sampling and rewards.
    policy: the model.
    params: its parameters.
    sampler: see `samplers.make_sampler`, of as many answers as are wanted.
    key: of the samples.
  """

  config: ConfigDict
  policy: Policy
  params: Params
  sampler: Callable[..., Any]
  key: jax.Array


def speaker(
  config: ConfigDict, policy: Policy, params: Params, samples: int, greedy: bool
) -> Speaker:
  """A model that gives so many answers; `greedy`, the most probable tokens."""
  sampling = from_config.sampling(config)
  if greedy:
    sampling = sampling._replace(temperature=0.0)
  sampler = samplers.make_sampler(config, policy, samples, sampling)
  return Speaker(config, policy, params, sampler, jax.random.key(config.seed))


def _roomy(config: ConfigDict, tokens: int) -> ConfigDict:
  """A config whose prompts may have so many tokens; few sizes compile."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    while config.data.max_prompt_length < tokens:
      config.data.max_prompt_length *= 2
  return config


def ask(
  speaker: Speaker,
  example: dict[str, Any],
  turn: int = 0,
  reward_pool: RewardPool | None = None,
) -> tuple[str, list[Answer]]:
  """What a model answers.

  Args:
    speaker: the model.
    example: with its "prompt", and for a reward model what that reads.
    turn: another one draws other samples.
    reward_pool: of the rewards; None for none.

  Returns:
    The prompt as the model reads it, and the answers.

  Raises:
    ValueError: what the model's chat template does not take.
  """
  config, policy = speaker.config, speaker.policy
  _, ids = prompts_lib.encoder(config, policy)(example["prompt"])
  config = _roomy(config, len(ids))
  prompts, examples = prompts_lib.prompts_of(config, policy, [example], [0])
  key = jax.random.fold_in(speaker.key, turn)
  samples = speaker.sampler(speaker.params, prompts_lib.trim(prompts), key)
  if reward_pool is None:
    texts, rewards = policy_lib.decode(policy, samples), None
  else:
    texts, scores = scored_text.score(policy, reward_pool, examples, samples)
    rewards = scores.rewards[0].tolist()
  tokens = np.sum(samples.completion_mask[0], axis=-1).tolist()
  finished = np.asarray(samples.finished[0]).tolist()
  rewards = rewards or [None] * len(tokens)
  found = map(Answer, texts[0], tokens, finished, rewards)
  return examples[0]["prompt_text"], list(found)


def lines(answers: list[Answer]) -> list[str]:
  """Answers, to print: control characters are escaped."""
  shown = []
  for i, answer in enumerate(answers, 1):
    words = [f"[{i}/{len(answers)}]"] * (len(answers) > 1)
    if answer.reward is not None:
      words.append(f"reward {answer.reward:g}")
    words.append(f"{answer.tokens} tokens")
    words += ["cut off there"] * (not answer.finished)
    shown += [printable(answer.text).rstrip(), f"  ({', '.join(words)})"]
  return shown


def talk(
  speaker: Speaker, read: Iterator[str], say: Callable[[str], None], turns: bool
) -> None:
  """Answers one line after another, to their end or `QUIT`.

  Args:
    speaker: with several answers a prompt, the first of them is remembered.
    read: the lines.
    say: prints.
    turns: whether the model is shown what was said before; needs a chat
      template.
  """
  said: list[dict[str, str]] = []
  for turn, line in enumerate(read):
    text = line.strip()
    if text == QUIT:
      return
    if text == NEW:
      said = []
    elif text:
      user = {"role": "user", "content": text}
      prompt: Prompt = [*said, user] if said else text
      try:
        _, answers = ask(speaker, {"prompt": prompt}, turn)
      except ValueError as error:
        say(f"error: {error}")
        continue
      say("\n".join(lines(answers)))
      if turns:
        mine = {"role": "assistant", "content": answers[0].text}
        said = [*(said or []), user, mine]
