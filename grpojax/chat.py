"""Prints a model's answers to prompts.

    python -m grpojax.chat --model=DIR [--prompt=TEXT | --example=N]
                           [--samples=N] [--temperature=T]
                           [--config.key=value ...]

DIR is the directory of a training run, finished or not, a Hugging Face
directory, or the name of a bundled model. For a run, prompts are formatted and
answers sampled as in training (data.template, data.system_prompt, ...), unless
--temperature or --config.sampling.* change this. Other models get prompts in
their chat template or, without a template, as plain text to continue.

--prompt=TEXT asks once. --example=N asks held-out problem N (the first is 0)
and prints each answer with its reward. Data and rewards are the run's or, for
other models, set by --config.data.* and --config.reward.*. Without either flag,
each line of standard input is a prompt; /new clears the history, /quit or
Ctrl-D ends the chat. Control characters in answers are escaped.
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
from grpojax.training import policies
from grpojax.training.config import SETTINGS, from_config
from grpojax.training.data import prompts, splits
from grpojax.training.run import memory, run_models
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes, sample_rows, sampling, scoring

NEW, QUIT = "/new", "/quit"
HELP = f"each line is a prompt; {NEW} clears the history, {QUIT} ends the chat"

FLAGS = {
  "model": setting("", "run, directory, .gguf file or bundled model"),
  "best": setting(False, "use the checkpoint of highest held-out accuracy"),
  "prompt": setting("", 'single prompt; "" = each line of standard input'),
  "example": setting(
    -1, "number of the held-out problem; -1 = none", within="[-1, inf)"
  ),
  "samples": setting(1, "answers per prompt", within="[1, 1024]"),
  "turns": setting(
    "auto",
    "turns that the model reads; `auto`: `all` if the model has a chat template"
    " and is not a run, else `one`",
    choices=("auto", "all", "one"),
  ),
  "temperature": setting(
    -1.0,
    "temperature; 0 = greedy, -1 = config.sampling.temperature",
    within="[-1, 100]",
  ),
}
READS = (
  "model.dtype model.ignore_keys seed data. environment. reward. sampling."
).split()
"""Settings, or prefixes of settings, that affect answers."""


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
  except UnicodeEncodeError as error:  # Python escapes undecodable bytes
    raise ValueError("--prompt is not valid UTF-8: re-encode it") from error
  if run_models.is_run(flags.model):
    config, flags = parse(lambda: run_models.read_config(flags.model))
  if flags.temperature > 0:
    config.sampling.temperature = flags.temperature
  settings = from_config(config)
  if flags.example >= 0:
    scoring.resolve_functions(settings)
  return settings, flags


def _example(settings: TrainSettings, number: int) -> dict[str, Any]:
  """Loads held-out example `number`; ValueError if it does not exist."""
  count = max(settings.eval.num_prompts, number + 1)
  evaluated = dataclasses.replace(settings.eval, num_prompts=count)
  settings = dataclasses.replace(settings, eval=evaluated)
  try:
    examples = splits.load_examples(settings, "test")
  except ValueError as error:  # quotes eval.num_prompts, not set by the user
    internal = f"eval.num_prompts = {count}"
    message = str(error).replace(internal, f"--example = {number}")
    raise ValueError(message) from error
  if number >= len(examples):
    raise ValueError(
      f"--example={number}: use 0 to {len(examples) - 1}, the held-out problems"
    )
  return examples[number]


class Answer(NamedTuple):
  """Completion of a prompt, with its reward and earlier turns."""

  text: str  # not escaped
  tokens: int  # number of tokens, the EOS included
  finished: bool  # True if it ended within sampling.max_new_tokens
  reward: float | None = None  # nan if it failed; None if not computed
  before: tuple[str, ...] = ()  # earlier turns of model and environment
  error: str | None = None  # message if the environment failed


class Speaker(NamedTuple):
  """Model with its sampler and reward functions."""

  settings: TrainSettings
  policy: policies.Policy
  params: Params
  sampler: Callable[..., Any]  # from `step.sampling.make_sampler`
  reward_pool: scoring.RewardPool | None = None  # None to compute no rewards


def _fit_prompt(
  settings: TrainSettings, policy: policies.Policy, example: dict[str, Any]
) -> TrainSettings:
  """Doubles data.max_prompt_length until the example's prompt fits.

  Doubling keeps compilations few. ValueError if the prompt is too long.
  """
  _, ids = prompts.encoder(settings, policy)(example["prompt"])
  new_tokens = settings.sampling.max_new_tokens
  policies.check_positions(policy.files, len(ids), new_tokens)
  length = settings.data.max_prompt_length or 32
  while length < len(ids):
    length *= 2
  data = dataclasses.replace(settings.data, max_prompt_length=length)
  return dataclasses.replace(settings, data=data)


def ask(
  speaker: Speaker, example: dict[str, Any], turn: int = 0
) -> tuple[str, list[Answer]]:
  """Returns the formatted prompt of an example and the model's answers.

  Each `turn` draws different samples. ValueError if the prompt is too long or
  the model's chat template refuses it.
  """
  policy = speaker.policy
  settings = _fit_prompt(speaker.settings, policy, example)
  batch, examples = prompts.prompts_of(settings, policy, [example], [0])
  key = jax.random.fold_in(seed_key(settings.seed), turn)
  args = speaker.params, prompts.trim(batch), examples, key
  sampled = sampling.complete(speaker.sampler, *args)
  samples = sampled.rollout
  if speaker.reward_pool is None:
    texts = policies.decode(policy, samples)
    rewards = [None] * len(texts[0])
  else:
    texts, scores = scoring.compute_rewards(
      policy, speaker.reward_pool, examples, sampled
    )
    rewards = scores.rewards[0].tolist()
  tokens = np.sum(samples.completion_mask[0], axis=-1).tolist()
  finished = np.asarray(samples.finished[0]).tolist()
  answers = [*map(Answer, texts[0], tokens, finished, rewards)]
  transcripts = sampled.transcripts[0] if sampled.transcripts else []
  for g, transcript in enumerate(transcripts):
    trajectory = {
      "ids": samples.completion_ids,
      "mask": samples.completion_mask,
      "turns": samples.turns,
      "turn_rewards": samples.turn_rewards,
    }
    trajectory = {name: np.asarray(x[0, g]) for name, x in trajectory.items()}
    *turns, _ = sample_rows.turns_of(policy.tokenizer, trajectory)
    before = tuple(f"{x['by']}: {x['text'].strip()}" for x in turns)
    error = transcript["episode_error"]
    answers[g] = answers[g]._replace(before=before, error=error)
  return examples[0]["prompt_text"], answers


def answer_lines(answers: list[Answer]) -> list[str]:
  """Formats answers as lines to print, with control characters escaped."""
  texts = []
  for i, answer in enumerate(answers, 1):
    about = [f"[{i}/{len(answers)}]"] if len(answers) > 1 else []
    if answer.reward is not None:
      about.append(f"reward {answer.reward:g}")
    about.append(f"{answer.tokens} tokens")
    if not answer.finished:
      about.append("truncated")
    if answer.error:
      about.append(f"the environment failed: {printable(answer.error)}")
    texts += map(printable, answer.before)
    texts += [printable(answer.text).rstrip(), f"  ({', '.join(about)})"]
  return texts


def talk(
  speaker: Speaker, read: Iterator[str], say: Callable[[str], None], turns: bool
) -> None:
  """Passes the answer to each line of `read` to `say`, until a line is `QUIT`.

  If `turns` is True, the model also reads earlier lines and the first answer to
  each, which needs a chat template.
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
        say(printable(f"error: {error}"))  # the error may quote the template
        continue
      say("\n".join(answer_lines(answers)))
      if turns:
        answer = {"role": "assistant", "content": answers[0].text}
        history = [*history, user, answer]


def _set_up(
  settings: TrainSettings, flags: ConfigDict, stack: contextlib.ExitStack
) -> tuple[Speaker, dict[str, Any] | None, bool]:
  """Returns the speaker, the example to ask, if any, and whether to read turns.

  All errors are raised before compilation.
  """
  policy, params = run_models.load(flags.model, settings.model, flags.best)
  policy = policies.with_stop(policy, settings.sampling.stop)
  memory.refuse(memory.evaluation(settings, policy.shape, flags.samples))
  example = {"prompt": flags.prompt} if flags.prompt else None
  if flags.example >= 0:
    example = _example(settings, flags.example)
  if example:
    _fit_prompt(settings, policy, example)
  has_template = bool(policy.tokenizer.chat_template)
  if flags.turns == "all" and not has_template:
    raise ValueError("--turns=all needs a chat template: use --turns=one")
  turns = flags.turns == "all"
  if flags.turns == "auto":
    turns = has_template and not run_models.is_run(flags.model)
  pool = environment = None
  if flags.example >= 0:
    pool = stack.enter_context(scoring.open_reward_pool(settings))
    environment = pool.environment
  elif settings.environment.on:
    environment = stack.enter_context(episodes.open_pool(settings))
  distribution = settings.sampling.distribution
  if flags.temperature == 0:
    distribution = dataclasses.replace(distribution, temperature=0.0)
  sampler = sampling.make_sampler(
    settings, policy, flags.samples, distribution, environment=environment
  )
  speaker = Speaker(settings, policy, params, sampler, pool)
  return speaker, example, turns


def _lines() -> Iterator[str]:
  """Yields lines of standard input; on a terminal, prints "> " before each."""
  typed = sys.stdin.isatty()
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors="replace")
  if typed:
    import readline  # noqa: F401  makes `input` edit lines

    print(f"{HELP}; the first answer is slow (it compiles)")
  while True:
    try:
      yield input("> " if typed else "")
    except EOFError:
      return


def _ask_once(speaker: Speaker, example: dict[str, Any]) -> None:
  """Prints answers to an example; given rewards, also prompt and solution."""
  pool = speaker.reward_pool
  if pool is not None:
    steps = speaker.settings.steps  # for rewards that depend on the step
    (example,) = scoring.with_step(pool.pool, [example], steps, steps)
  prompt, answers = ask(speaker, example)
  if pool is not None:
    print(printable(prompt).rstrip())
  print(*answer_lines(answers), sep="\n")
  if pool is not None and "answer" in example:
    print(f"correct answer: {printable(str(example['answer']))}")


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
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
