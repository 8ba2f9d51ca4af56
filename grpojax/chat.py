"""Asks a model, and shows its answers.

    python -m grpojax.chat --model=DIR [--prompt=TEXT | --example=N]
                           [--samples=N] [--temperature=T]
                           [--config.key=value ...]

DIR is the directory of a training run, finished or not, a Hugging Face
directory, or the name of an embedded model. A run formats prompts and samples
as in training (data.template, data.system_prompt, ...); --temperature and
--config.sampling.* change that. Other models use their chat template, if any;
without one, a prompt is continued as text.

--prompt asks once. --example=N asks problem N of the held-out data, from 0, and
shows each answer with its reward: data and rewards are a run's own, and those
of --config.data.* and --config.reward.* for other models. Without either, each
line of standard input is a prompt; /new forgets earlier lines, /quit or Ctrl-D
ends. Control characters in answers are escaped.
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

FLAGS = {
  "model": setting("", "a run, directory, .gguf file or embedded model"),
  "best": setting(False, "of a run: the state of checkpoint.best"),
  "prompt": setting("", 'asked once; "" = each line of standard input'),
  "example": setting(
    -1, "held-out problem to ask once and score; -1 = none", within="[-1, inf)"
  ),
  "samples": setting(1, "answers to each prompt", within="[1, 1024]"),
  "turns": setting(
    "auto",
    "turns of a chat that the model sees; auto = one for a run, else all",
    choices=("auto", "all", "one"),
  ),
  "temperature": setting(
    -1.0, "of the samples; 0 = greedy, -1 = as in training", within="[-1, 100]"
  ),
}
READS = (
  "model.dtype model.ignore_keys seed data. environment. reward. sampling."
).split()
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
  """Loads a held-out example; ValueError if there are fewer."""
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
  finished: bool  # True if it ended within sampling.max_new_tokens
  reward: float | None = None  # nan if it failed; None without rewards
  before: tuple[str, ...] = ()  # earlier turns, and an environment's answers
  error: str | None = None  # why the environment failed


class Speaker(NamedTuple):
  """A model that answers."""

  settings: TrainSettings
  policy: Policy
  params: Params
  sampler: Callable[..., Any]  # from `step.sampling.make_sampler`
  key: jax.Array  # of the samples
  reward_pool: rewards_lib.RewardPool | None = None  # None: without rewards


def _fit_prompt(
  settings: TrainSettings, policy: Policy, example: dict[str, Any]
) -> TrainSettings:
  """Doubles data.max_prompt_length until a prompt fits: few sizes compile.

  ValueError if the model has no positions for the prompt and an answer.
  """
  _, ids = prompts_lib.encoder(settings, policy)(example["prompt"])
  new_tokens = settings.sampling.max_new_tokens
  policy_lib.check_positions(
    policy.directory, len(ids), new_tokens, policy.ignore_keys
  )
  length = settings.data.max_prompt_length or 32
  while length < len(ids):
    length *= 2
  data = dataclasses.replace(settings.data, max_prompt_length=length)
  return dataclasses.replace(settings, data=data)


def ask(
  speaker: Speaker, example: dict[str, Any], turn: int = 0
) -> tuple[str, list[Answer]]:
  """Returns the prompt of an example as the model reads it, and its answers.

  Another turn draws other samples. ValueError if the model's chat template
  does not take the prompt.
  """
  policy = speaker.policy
  settings = _fit_prompt(speaker.settings, policy, example)
  prompts, examples = prompts_lib.prompts_of(settings, policy, [example], [0])
  key = jax.random.fold_in(speaker.key, turn)
  sampled = speaker.sampler(
    speaker.params, prompts_lib.trim(prompts), examples, key
  )
  samples = sampled.rollout
  if speaker.reward_pool is None:
    texts = policy_lib.decode(policy, samples)
    rewards = [None] * len(texts[0])
  else:
    texts, scores = rewards_lib.compute_rewards(
      policy, speaker.reward_pool, examples, sampled
    )
    rewards = scores.rewards[0].tolist()
  tokens = np.sum(samples.completion_mask[0], axis=-1).tolist()
  finished = np.asarray(samples.finished[0]).tolist()
  answers = [*map(Answer, texts[0], tokens, finished, rewards)]
  for g, row in enumerate(
    sampled.transcripts[0] if sampled.transcripts else ()
  ):
    arrays = {
      "ids": samples.completion_ids,
      "mask": samples.completion_mask,
      "turns": samples.turns,
      "turn_rewards": samples.turn_rewards,
    }
    one = {name: np.asarray(x[0, g]) for name, x in arrays.items()}
    *blocks, _ = sample_rows.turns_of(policy.tokenizer, one)
    before = tuple(f"{x['by']}: {x['text'].strip()}" for x in blocks)
    answers[g] = answers[g]._replace(before=before, error=row["episode_error"])
  return examples[0]["prompt_text"], answers


def answer_lines(answers: list[Answer]) -> list[str]:
  """Returns lines to print; their control characters are escaped."""
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
  """Answers one line after another, until they end or `QUIT`.

  With `turns`, which need a chat template, the model sees the earlier lines and
  the first answer to each.
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
      prompt = [*history, user] if history else text
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
) -> tuple[Speaker, dict[str, Any] | None, bool]:
  """Returns the model, its only example if any, and True if it sees old turns.

  All errors come before anything compiles.
  """
  policy, params = run_models.load(flags.model, settings.model, flags.best)
  policy = policy_lib.with_stop(policy, settings.sampling.stop)
  memory.refuse(memory.evaluation(settings, policy.shape, flags.samples))
  example = {"prompt": flags.prompt} if flags.prompt else None
  if flags.example >= 0:
    example = _example(settings, flags.example)
  if example:
    _fit_prompt(settings, policy, example)
  has_template = bool(policy.tokenizer.chat_template)
  if flags.turns == "all" and not has_template:
    raise ValueError("--turns=all: the model has no chat template; use one")
  turns = flags.turns == "all"
  if flags.turns == "auto":
    turns = has_template and not run_models.is_run(flags.model)
  pool = environment = None
  if flags.example >= 0:
    pool = stack.enter_context(rewards_lib.open_reward_pool(settings))
    environment = pool.environment
  elif settings.environment.on:
    environment = stack.enter_context(episodes.open_pool(settings))
  distribution = settings.sampling.distribution
  if flags.temperature == 0:
    distribution = dataclasses.replace(distribution, temperature=0.0)
  sampler = sampling_lib.make_sampler(
    settings, policy, flags.samples, distribution, environment=environment
  )
  key = seed_key(settings.seed)
  speaker = Speaker(settings, policy, params, sampler, key, pool)
  return speaker, example, turns


def _lines() -> Iterator[str]:
  """Yields lines of standard input; a terminal is shown a prompt."""
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


def _ask_once(speaker: Speaker, example: dict[str, Any]) -> None:
  """Prints the answers to an example, and its prompt if they have rewards."""
  pool = speaker.reward_pool
  if pool is not None:
    steps = speaker.settings.steps  # of the run, which has ended
    (example,) = rewards_lib.with_step(pool.pool, [example], steps, steps)
  prompt, answers = ask(speaker, example)
  if pool is not None:
    print(printable(prompt).rstrip())
  print(*answer_lines(answers), sep="\n")
  if pool is not None and "answer" in example:
    print(f"the right answer: {printable(str(example['answer']))}")


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  compilation.keep()
  with contextlib.ExitStack() as stack:
    with command_line.usage_errors():
      settings, flags = _parse(argv)
      speaker, example, turns = _set_up(settings, flags, stack)
    if example:
      _ask_once(speaker, example)
    else:
      talk(speaker, _lines(), print, turns)


if __name__ == "__main__":
  main(sys.argv[1:])
