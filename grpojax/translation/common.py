"""What TRL's and verl's configurations say alike."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpojax.core import micro_batches as micro_batches_lib
from grpojax.runtime.trackers import TRACKERS
from grpojax.training.optimizer import SCHEDULES
from grpojax.translation.parts import (
  NOTHING,
  Theirs,
  Translation,
  also,
  differs,
  missing,
  setting,
)

TARGETS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
TARGETS |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
FILES = (".jsonl", ".json", ".parquet", ".csv")
UNCLIPPED = 1e9
"""A bound of the gradient's norm that is none."""


_MOST = 2**20  # completions of an update; published runs have thousands


class OptimizerNames(NamedTuple):
  """What the settings of an optimizer are called."""

  name: str
  rate: str
  schedule: str
  decay: str
  norm: str


def optimizer(theirs: Theirs, names: OptimizerNames) -> Translation:
  """Optimizer, learning rate, schedule, decay, and clipping."""
  found = setting(
    theirs, "optim.learning_rate", names.rate, float(theirs[names.rate])
  )
  found += setting(
    theirs, "optim.weight_decay", names.decay, float(theirs[names.decay])
  )
  kind = str(theirs[names.name] or "").lower()
  if "adafactor" in kind:
    found += also("optim.name", "adafactor", theirs.said(names.name))
  elif not kind.startswith("adam"):
    said = f"{theirs[names.name]!r}: AdamW is taken; adafactor is there too"
    found += missing(names.name, said)
  elif "8bit" in kind or "paged" in kind:
    found += differs(
      names.name, "moments are float32, or optim.moments_dtype = 'bfloat16'"
    )
  schedule = str(theirs[names.schedule] or "constant")
  ours = schedule.removesuffix("_with_warmup")
  if ours in SCHEDULES:
    found += also("optim.schedule", ours, theirs.said(names.schedule))
  else:
    said = f"{schedule!r}: there are {', '.join(SCHEDULES)}; constant is taken"
    found += missing(names.schedule, said)
    found += also("optim.schedule", "constant", theirs.said(names.schedule))
  norm = float(theirs[names.norm] or 0) or UNCLIPPED
  return found + setting(theirs, "optim.max_grad_norm", names.norm, norm)


def model(theirs: Theirs, name: str) -> Translation:
  """The model's directory or name, and what suits large ones."""
  found = also("mesh.data", 1)
  found += also("mesh.fsdp", -1, "parameters over all devices")
  found += also("sampling.compact", False, "fewer sizes to compile")
  path = theirs[name]
  if not path:
    said = "not in the file: give --config.model.path"
    return found + missing(name, said)
  return found + also("model.path", str(path), theirs.said(name))


def run_name(theirs: Theirs, name: str, directory: Any = None) -> Translation:
  """The run's name, from the other's, or the end of its directory."""
  text = str(theirs[name] or directory or "translated")
  text = re.sub(r"[^\w.-]+", "-", text.rstrip("/").rpartition("/")[2]).strip(
    "-."
  )
  said = theirs.said(name) if theirs[name] else ""
  return also("name", text or "translated", said)


def lora(theirs: Theirs, rank: str, alpha: str, targets: str) -> Translation:
  """Adapters."""
  found = also("lora.rank", int(theirs[rank]), theirs.said(rank))
  found += also("lora.alpha", float(theirs[alpha]), theirs.said(alpha))
  names = theirs[targets]
  if names in (None, "all-linear"):
    return found
  names = [names] if isinstance(names, str) else list(names)
  known = [TARGETS[n] for n in names if n in TARGETS]
  if known:
    pattern = f"layers/({'|'.join(known)})"
    found += also("lora.targets", pattern, theirs.said(targets))
  for name in names:
    if name not in TARGETS:
      said = f"{name!r}: adapters are of {', '.join(TARGETS)}"
      found += missing(targets, said)
  return found


def data(theirs: Theirs, name: str) -> Translation:
  """The data set, by name or path."""
  given = theirs[name]
  found = also("data.template", "{prompt}", "prompts as they are")
  if not given:
    found += also("data.name", "jsonl")
    found += also("data.path", "data")
    return found + missing(
      name, "not in the file: data.path = 'data' stands in its place"
    )
  paths = [given] if isinstance(given, str) else list(map(str, given))
  path = str(paths[0])
  for other in paths[1:]:
    found += missing(
      name, f"{other!r}: data.mixture takes several data sets, or a pattern"
    )
  if path.lower() in ("gsm8k", "openai/gsm8k"):
    return found + also("data.name", "gsm8k", theirs.said(name))
  kind = "parquet" if path.endswith(".parquet") else "jsonl"
  if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not path.endswith(FILES):
    kind = "huggingface"
  found += also("data.name", kind)
  found += also("data.path", path, theirs.said(name))
  return found + differs(
    name,
    "examples have a prompt and an answer: data.options.prompt and .answer name"
    " their columns ('' for none); data.options.test holds a share out where"
    " there is no test split",
  )


def template_options(theirs: Theirs, name: str) -> Translation:
  """Keywords of the chat template: nested, or a mapping as it stands."""
  whole = theirs.given.get(name)
  options = dict(whole) if isinstance(whole, Mapping) else {}
  for key, value in theirs.given.items():
    if key.startswith(f"{name}."):
      options[key.removeprefix(f"{name}.")] = value
  found = NOTHING
  for key, value in options.items():
    found += also(f"data.template_options.{key}", value, name)
  return found


def trackers(theirs: Theirs, name: str) -> Translation:
  """Where metrics go besides the run directory."""
  given = theirs[name]
  given = [given] if isinstance(given, str) else list(given or ())
  known = tuple(one for one in given if one in TRACKERS)
  found = also("log.trackers", known, theirs.said(name))
  for one in given:
    if one not in (*TRACKERS, "console", "none", "all"):
      names = ", ".join(TRACKERS)
      found += missing(name, f"{one!r}: the trackers here are {names}")
  return found


def micro_batches(prompts: int, group_size: int, wanted: int) -> int:
  """The smallest number of parts, from the wanted one on, that can be cut.

  Raises:
    ValueError: so many completions that nobody means it: trying takes hours.
  """
  if prompts * group_size > _MOST:
    raise ValueError(
      f"an update of {prompts} prompts x {group_size} completions is over "
      f"{_MOST}: check the sizes of batches"
    )
  for parts in range(max(wanted, 1), prompts * group_size):
    try:
      micro_batches_lib.cuts(prompts, group_size, parts)
      return parts
    except ValueError:
      continue
  return prompts * group_size
