"""Asks a model, and shows its answers.

    python -m grpojax.chat --model=DIR [--prompt=TEXT | --example=N]
                           [--samples=N] [--temperature=T]
                           [--config.key=value ...]

DIR is the run directory of a training run, finished or not, a Hugging Face
directory, or the name of an embedded model. A run's prompts are set as it was
trained on (data.template, data.system_prompt, ...), and it samples as it did in
training; --temperature and --config.sampling.* change that. A prompt is set by
the model's chat template, where it has one, and else continued as text.

--prompt asks once. --example=N asks problem N of the held-out data, from 0, and
shows each answer with its reward: of a run these are its own data and rewards,
of a model those of --config.data.* and --config.reward.*. Without either, each
line of standard input is a prompt; /new forgets what was said, /quit or Ctrl-D
ends.

Control characters of what the model writes are escaped.
"""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.random_keys import seed_key
from grpojax.core.types import Params
from grpojax.environments.pool import EnvironmentPool
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.terminal.screen import printable
from grpojax.training import policy as policy_lib
from grpojax.training import run_models
from grpojax.training.config import SETTINGS, from_config
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits
from grpojax.training.policy import Policy
from grpojax.training.report import sample_rows
from grpojax.training.run import memory
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib

NEW, QUIT = "/new", "/quit"
HELP = f"a line is a prompt; {NEW} forgets what was said, {QUIT} ends"

Prompt = str | list[dict[str, str]]

TURNS = ("auto", "all", "one")
FLAGS = {
  "model": setting("", "a run, directory, .gguf file or embedded model"),
  "best": setting(
    False,
    "of a run, the state of the highest held-out accuracy (checkpoint.best)",
  ),
  "prompt": setting("", 'asked once; "" = each line of standard input'),
  "example": setting(
    -1,
    "number of a held-out problem, from 0, asked once and scored; -1 = none",
    within="[-1, inf)",
  ),
  "samples": setting(1, "answers to each prompt", within="[1, 1024]"),
  "turns": setting(
    "auto",
    "what a chat's prompt is shown with: all that was said before, or that one "
    "alone; auto = one for a run, which was trained so, and all for others",
    choices=TURNS,
  ),
  "temperature": setting(
    -1.0, "of the samples; 0 = greedy, -1 = as in training", within="[-1, 100]"
  ),
}
MODEL = ["model.dtype", "model.ignore_keys"]
READS = [*MODEL, *"seed data. environment. reward. sampling.".split()]
"""Settings, or their beginnings, that change an answer."""


def _parse(argv: list[str]) -> tuple[TrainSettings, ConfigDict]:
  def parse(default=None):
    return command_line.parse(
      argv, FLAGS, SETTINGS, __doc__, default, "model", READS
    )

  config, flags = parse()
  if not flags.model:
    raise ValueError(f"give --model: {FLAGS['model'].text}")
  if flags.prompt and flags.example >= 0:
    raise ValueError("give --prompt or --example, not both")
  try:
    flags.prompt.encode()
  except UnicodeEncodeError as error:  # so Python hands on other bytes
    raise ValueError("--prompt is no UTF-8 text: give it as such") from error
  if run_models.is_run(flags.model):
    config, flags = parse(lambda: run_models.read_config(flags.model))
  if flags.temperature > 0:
    config.sampling.temperature = flags.temperature
  settings = from_config(config)
  if flags.example >= 0:
    rewards_lib.resolve_functions(settings)
  return settings, flags


def _example(settings: TrainSettings, number: int) -> dict[str, Any]:
  """Loads a held-out example; ValueError where there are fewer."""
  count = max(settings.eval.num_prompts, number + 1)
  evaluated = dataclasses.replace(settings.eval, num_prompts=count)
  settings = dataclasses.replace(settings, eval=evaluated)
  try:
    examples = splits.load_examples(settings, "test")
  except ValueError as error:  # of drawn problems, which are counted by that
    setting = f"eval.num_prompts = {count}"
    message = str(error).replace(setting, f"--example = {number}")
    raise ValueError(message) from error
  if number >= len(examples):
    raise ValueError(
      f"--example={number}: there are {len(examples)} held-out problems, the "
      f"last is {len(examples) - 1}"
    )
  return examples[number]


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


def make_speaker(
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
  return Speaker(settings, policy, params, sampler, seed_key(settings.seed))


def _with_room(settings: TrainSettings, tokens: int) -> TrainSettings:
  """Doubles data.max_prompt_length until a prompt fits: few sizes compile."""
  length = settings.data.max_prompt_length or 32
  while length < tokens:
    length *= 2
  data = dataclasses.replace(settings.data, max_prompt_length=length)
  return dataclasses.replace(settings, data=data)


def _prompt_length(
  settings: TrainSettings, policy: Policy, example: dict[str, Any]
) -> int:
  """Counts a prompt's tokens; ValueError if the model cannot answer it."""
  _, ids = prompts_lib.encoder(settings, policy)(example["prompt"])
  new_tokens = settings.sampling.max_new_tokens
  policy_lib.check_positions(
    policy.directory, len(ids), new_tokens, policy.ignore_keys
  )
  return len(ids)


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
  settings = _with_room(settings, _prompt_length(settings, policy, example))
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


def answer_lines(answers: list[Answer]) -> list[str]:
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
      say("\n".join(answer_lines(answers)))
      if turns:
        answer = {"role": "assistant", "content": answers[0].text}
        history = [*history, user, answer]


def _set_up(
  settings: TrainSettings, flags: ConfigDict, stack: contextlib.ExitStack
) -> tuple[
  Speaker,
  dict[str, Any] | None,
  bool,
  rewards_lib.RewardPool | None,
]:
  """Loads the model, and checks all that can be wrong before it compiles.

  Returns:
    The model; the only example that it is asked, or None; True if it is shown
    the lines and answers before; the rewards of a held-out example, or None.
  """
  policy, params = run_models.load(flags.model, settings.model, flags.best)
  policy = policy_lib.with_stop(policy, settings.sampling.stop)
  memory.refuse(memory.evaluation(settings, policy.shape, flags.samples))
  example = {"prompt": flags.prompt} if flags.prompt else None
  if flags.example >= 0:
    example = _example(settings, flags.example)
  if example:
    _prompt_length(settings, policy, example)
  chats = bool(policy.tokenizer.chat_template)
  if flags.turns == "all" and not chats:
    raise ValueError("--turns=all: the model has no chat template; use one")
  turns = flags.turns == "all"
  if flags.turns == "auto":
    turns = chats and not run_models.is_run(flags.model)
  greedy = flags.temperature == 0
  reward_pool = environment = None
  if flags.example >= 0:
    opened = rewards_lib.open_reward_pool(settings)
    reward_pool = stack.enter_context(opened)
    environment = reward_pool.environment
  elif settings.environment.on:
    environment = stack.enter_context(episodes.open_pool(settings))
  speaker = make_speaker(
    settings, policy, params, flags.samples, greedy, environment
  )
  return speaker, example, turns, reward_pool


def _lines() -> Iterator[str]:
  """Yields lines of standard input, with a prompt where somebody types them."""
  typed = sys.stdin.isatty()
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8
  if typed:
    import readline  # noqa: F401  makes `input` edit lines

    print(f"{HELP}; the first answer takes a while (it compiles)")
  while True:
    try:
      yield input("> " if typed else "")
    except EOFError:
      return


def _ask_scored(
  speaker: Speaker,
  example: dict[str, Any],
  reward_pool: rewards_lib.RewardPool,
) -> None:
  """Prints a prompt, and the answers to it with their rewards."""
  steps = speaker.settings.steps  # of the run, which has ended
  (example,) = rewards_lib.with_step(reward_pool.pool, [example], steps, steps)
  prompt, answers = ask(speaker, example, 0, reward_pool)
  print(printable(prompt).rstrip())
  print(*answer_lines(answers), sep="\n")
  if "answer" in example:
    print(f"the right answer: {printable(str(example['answer']))}")


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  compilation.keep()
  with contextlib.ExitStack() as stack:
    with command_line.usage_errors():
      settings, flags = _parse(argv)
      speaker, example, turns, pool = _set_up(settings, flags, stack)
    if pool is not None:
      _ask_scored(speaker, example, pool)
    elif example:
      _, answers = ask(speaker, example)
      print(*answer_lines(answers), sep="\n")
    else:
      talk(speaker, _lines(), print, turns)


if __name__ == "__main__":
  main(sys.argv[1:])
