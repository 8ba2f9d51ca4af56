"""Facts that a run learns at its start, and settings completed with them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpojax.runtime.text.chat_template import DATE
from grpojax.training.settings.run import TrainSettings


class Facts(NamedTuple):
  """Facts of a run's start, which its config.json records."""

  commits: Mapping[str, str] = {}  # by "KIND:ORG/NAME@REVISION"
  date: str | None = None  # for a chat template that uses it
  prompt_length: int = 0  # limit of a prompt in tokens; 0 = unknown
  logits_chunk: int = 0  # 0 = unknown


def commits_in(lines: Any) -> dict[str, str]:
  """Returns commits by "KIND:ORG/NAME@REVISION"; ignores damaged lines."""
  if not isinstance(lines, (list, tuple)):
    return {}
  pairs = [line.split("=") for line in lines if isinstance(line, str)]
  return dict(pair for pair in pairs if len(pair) == 2)


def completed(settings: TrainSettings, facts: Facts) -> TrainSettings:
  """Fills settings whose values a run finds out; other values stay."""
  commits = {**facts.commits, **commits_in(settings.commits)}
  lines = sorted(f"{key}={commit}" for key, commit in commits.items())
  dated = {} if facts.date is None else {DATE: facts.date}
  data = settings.data
  data = dataclasses.replace(
    data,
    max_prompt_length=data.max_prompt_length or facts.prompt_length,
    template_options=dated | dict(data.template_options),
  )
  optim = settings.optim
  chunk = optim.update.chunk_size or facts.logits_chunk
  update = dataclasses.replace(optim.update, chunk_size=chunk)
  optim = dataclasses.replace(optim, update=update)
  return dataclasses.replace(
    settings, commits=tuple(lines), data=data, optim=optim
  )
