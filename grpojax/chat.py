"""Asks a model, and shows its answers.

    python -m grpojax.chat --model=DIR [--prompt=TEXT | --example=N]
                           [--samples=N] [--temperature=T] [--top_p=P] ...
                           [--config.key=value ...]

DIR is the run directory of a training run, finished or not, a Hugging Face
directory, or the name of an embedded model. A run's prompts are set as it was
trained on (data.template, data.system_prompt, ...), and it samples as it did in
training; the flags change that. A prompt is set by the model's chat template,
where it has one, and else continued as text.

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
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.terminal.screen import printable
from grpojax.training import chat as chatting
from grpojax.training import run_models
from grpojax.training.config import SETTINGS, from_config
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits
from grpojax.training.run import memory
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes
from grpojax.training.step import rewards as rewards_lib

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
    -1.0, "of the samples; 0 = greedy, -1 = as in training", within="[-1, inf)"
  ),
  "top_k": setting(
    -1, "most probable tokens; 0 = all, -1 = as in training", within="[-1, inf)"
  ),
  "top_p": setting(
    -1.0, "their probability; 1 = all, -1 = as in training", within="[-1, 1]"
  ),
  "min_p": setting(
    -1.0,
    "as a share of the most probable; -1 = as in training",
    within="[-1, 1]",
  ),
  "max_new_tokens": setting(
    -1, "of an answer at most; -1 = as in training", within="[-1, 2**31)"
  ),
  "seed": setting(-1, "of the samples; -1 = the run's", within="[-1, 2**32)"),
}
READS = "seed model.dtype data. environment. reward. sampling.".split()
"""Settings, or their beginnings, that change an answer."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")


def _with_flags(config: ConfigDict, flags: ConfigDict) -> ConfigDict:
  """Puts the flags that are set into the config."""
  config = config.copy_and_resolve_references()
  for name in _SAMPLING:
    if -1 < flags[name] < 0:
      raise ValueError(f"--{name}={flags[name]}: {FLAGS[name].text}")
    if flags[name] >= 0 and (name, flags[name]) != ("temperature", 0):
      config.sampling[name] = flags[name]
  if flags.seed >= 0:
    config.seed = flags.seed
  return config


def _parse(argv: list[str]) -> tuple[TrainSettings, ConfigDict]:
  def parse(default=None):
    program = "python -m grpojax.chat"
    return command_line.parse(
      argv, FLAGS, SETTINGS, program, default, "model", __doc__, READS
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
  settings = from_config(_with_flags(config, flags))
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


def _set_up(
  settings: TrainSettings, flags: ConfigDict, stack: contextlib.ExitStack
) -> tuple[
  chatting.Speaker,
  dict[str, Any] | None,
  bool,
  rewards_lib.RewardPool | None,
]:
  """Loads the model, and checks all that can be wrong before it compiles.

  Returns:
    The model; the only example that it is asked, or None; True if it is shown
    the lines and answers before; the rewards of a held-out example, or None.
  """
  policy, params = run_models.load(
    flags.model, settings.model.dtype, flags.best
  )
  memory.refuse(
    memory.evaluation(settings, memory.shape(policy), flags.samples)
  )
  example = {"prompt": flags.prompt} if flags.prompt else None
  if flags.example >= 0:
    example = _example(settings, flags.example)
  if example:
    prompts_lib.encoder(settings, policy)(example["prompt"])
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
  speaker = chatting.speaker(
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

    print(f"{chatting.HELP}; the first answer takes a while (it compiles)")
  while True:
    try:
      yield input("> " if typed else "")
    except EOFError:
      return


def _ask_scored(
  speaker: chatting.Speaker,
  example: dict[str, Any],
  reward_pool: rewards_lib.RewardPool,
) -> None:
  """Prints a prompt, and the answers to it with their rewards."""
  steps = speaker.settings.steps  # of the run, which has ended
  (example,) = rewards_lib.with_step(reward_pool.pool, [example], steps, steps)
  prompt, answers = chatting.ask(speaker, example, 0, reward_pool)
  print(printable(prompt).rstrip())
  print(*chatting.lines(answers), sep="\n")
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
      _, answers = chatting.ask(speaker, example)
      print(*chatting.lines(answers), sep="\n")
    else:
      chatting.talk(speaker, _lines(), print, turns)


if __name__ == "__main__":
  main(sys.argv[1:])
