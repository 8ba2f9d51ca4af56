"""Training settings: optimizer, diagnostics, checkpoints, logging, stopping."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpojax.core.objective import Objective
from grpojax.core.optim import MOMENTS, OPTIMIZERS, SCHEDULES
from grpojax.core.options import (
  DECAY,
  frozen_options,
  not_negative,
  one_or_more,
  option,
  positive,
)
from grpojax.core.update import UpdateOptions
from grpojax.runtime.cli.settings import inline
from grpojax.runtime.terminal.trackers import TENSORBOARD
from grpojax.runtime.text.chat_template import DATE
from grpojax.training.settings import inputs

AUTO = "auto"  # adaptive group_size


@frozen_options
class OptimSettings:
  """Optimizer, learning rate and updates per step."""

  name: str = option("adamw", "optimizer; adafactor ignores b1", OPTIMIZERS)
  moments_dtype: str = option(
    "float32", "data type of moments; bfloat16 rounds stochastically", MOMENTS
  )
  learning_rate: float = positive(3e-4, "peak learning rate")
  schedule: str = option("constant", "learning rate after warmup", SCHEDULES)
  warmup_steps: int = not_negative(
    0,
    "optimizer updates of the linear warmup, which starts at learning_rate / "
    "(warmup_steps + 1)",
  )
  b1: float = option(0.9, "decay of the first moment", within=DECAY)
  b2: float = option(0.95, "decay of the second moment", within=DECAY)
  weight_decay: float = not_negative(
    0.0, "decoupled weight decay of all parameters except norms and biases"
  )
  update: UpdateOptions = inline(
    UpdateOptions(max_grad_norm=1.0, micro_batches=4)
  )
  packing: bool = option(
    True,
    "pack short completions into shared rows: less padding, more compilations",
  )


@frozen_options
class AutoGroupSizeSettings:
  """Adaptive group size (group_size=auto) for a fixed number of samples."""

  start: int = one_or_more(8, "first group size, with batch_size prompts")
  smallest: int = one_or_more(4, "minimum group size")
  largest: int = one_or_more(32, "maximum group size")
  decay: float = option(0.9, "decay of estimates per diagnosis", within=DECAY)
  margin: float = not_negative(
    0.25, "log2 distance beyond the midpoint of 2 sizes that triggers a change"
  )
  confidence: float = not_negative(
    1.0, "evidence needed for a change, in standard errors"
  )


@frozen_options
class DiagnosticsSettings:
  """Diagnosis of the gradient's noise and of the best group size."""

  every: int = not_negative(
    0, "steps between diagnoses, from step 2 on; 0 = off"
  )
  tangents: int = option(
    4, "random directions to project on; more = more precise", within="[2, inf)"
  )
  share: float = option(
    0.375, "share of prompts to diagnose, but at least 3", within="(0, 1]"
  )
  last_layers: int = not_negative(
    0, "number of last layers to diagnose; 0 = all layers"
  )


@frozen_options
class EvalSettings:
  """Greedy evaluations on held-out prompts."""

  every: int = one_or_more(5, "steps between evaluations")
  num_prompts: int = one_or_more(256, "held-out prompts, always the same")
  batch_size: int = one_or_more(128, "prompts per decoding batch")
  samples: int = not_negative(4, "completions to record per evaluation")


@frozen_options
class CheckpointSettings:
  """Checkpoints of the training state."""

  every: int = one_or_more(10, "steps between checkpoints")
  keep: int = one_or_more(2, "number of newest checkpoints to keep")
  best: bool = option(
    False,
    "keep the checkpoint of highest held-out accuracy and write it to model/",
  )


@frozen_options
class LogSettings:
  """Progress lines and records."""

  every: int = one_or_more(
    1, "steps (in evaluations: batches) between progress lines"
  )
  samples_every: int = one_or_more(10, "steps between recorded completions")
  sample_groups: int = not_negative(4, "groups to record each time; 0 = none")
  report_every: int = not_negative(0, "steps between reports; 0 = at the end")
  trackers: tuple[Any, ...] = option(
    (TENSORBOARD,),
    "metric trackers: tensorboard, wandb, or your own path/to/file.py:FUNCTION",
  )


@frozen_options
class ProfileSettings:
  """Profiler trace for xprof and TensorBoard."""

  steps: str = option("", 'steps to trace into profile/, FIRST:LAST; "" = none')


def profiled_steps(text: str) -> range:
  """Parses profile.steps: "10:12" means steps 10, 11, 12; "" means none."""
  if not text:
    return range(0)
  parts = re.fullmatch(r"(\d+):(\d+)", text)
  if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
    raise ValueError("give FIRST:LAST, such as 10:12 for steps 10, 11 and 12")
  return range(int(parts[1]), int(parts[2]) + 1)


@frozen_options
class StopSettings:
  """Limits of consecutive steps with a problem; at a limit the run ends."""

  skipped_updates: int = not_negative(
    10, "maximum steps in a row with non-finite gradients; 0 = no limit"
  )
  rewards_missing: int = not_negative(
    10, "maximum steps in a row without rewards; 0 = no limit"
  )
  zero_variance_groups: int = not_negative(
    100, "maximum steps in a row with equal rewards in each group; 0 = no limit"
  )
  truncated: int = not_negative(
    0, "maximum steps in a row with most completions truncated; 0 = no limit"
  )
  few_effective_samples: int = not_negative(
    0,
    "maximum steps in a row in which importance weights leave at most 10% of "
    "the samples effective (rollout_effective_samples); 0 = no limit",
  )
  engine_mismatch: int = not_negative(
    1,
    "maximum steps in a row in which log-probabilities of sampling.engine and "
    "trainer differ by over 0.02 nats per token (rollout_mismatch_mean); 0 = "
    "no limit",
  )
  no_improvement: int = not_negative(
    0, "maximum evaluations in a row without a higher accuracy; 0 = no limit"
  )


@frozen_options
class MeshSettings:
  """Number of devices along each axis; -1 = all remaining devices."""

  data: int = option(-1, "devices that share the rows of a batch")
  fsdp: int = option(
    1, "devices that share rows and parameters (gathered layer by layer)"
  )
  expert: int = option(1, "devices that share rows and experts")
  tensor: int = option(1, "devices that share attention, MLP and vocabulary")
  sampling_tensor: int = not_negative(
    0, "devices that share each weight while sampling; 0 = mesh.tensor"
  )
  sampling_devices: int = not_negative(
    0,
    "devices reserved for sampling the next step during the update (needs "
    "sampling.ahead = 1); 0 = none",
  )


@frozen_options
class TrainSettings:
  """Settings of a training run.

  In a config the fields of `training.config.AT_TOP` are top-level settings, and
  fields of an inline section belong to the section around it.
  """

  name: str = option(
    "arithmetic", "name of the run; --run_dir is runs/NAME by default"
  )
  seed: int = option(0, "random seed", within="[0, 2**32)")
  commits: tuple[Any, ...] = option(
    (),
    "commits of models and data on the Hub, KIND:ORG/NAME@REVISION=COMMIT, "
    "filled in when a run starts",
  )
  allow_changed_inputs: bool = option(
    False, "resume even if data, reward files or tokenizer changed"
  )
  steps: int = option(
    40, "training steps; raise to extend a finished run", within="[0, 2**31)"
  )
  batch_size: int = one_or_more(32, "prompts per step")
  group_size: int | str = one_or_more(
    8,
    "completions per prompt; auto = adapts to the best size (auto_group_size)",
    words=(AUTO,),
  )
  model: inputs.ModelSettings = inputs.ModelSettings()
  lora: inputs.LoraSettings = inputs.LoraSettings()
  data: inputs.DataSettings = inputs.DataSettings()
  difficulty: inputs.DifficultySettings = inputs.DifficultySettings()
  sampling: inputs.SamplingSettings = inputs.SamplingSettings()
  environment: inputs.EnvironmentSettings = inputs.EnvironmentSettings()
  reward: inputs.RewardSettings = inputs.RewardSettings()
  filter_groups: inputs.FilterGroupsSettings = inputs.FilterGroupsSettings()
  auto_group_size: AutoGroupSizeSettings = AutoGroupSizeSettings()
  loss: Objective = Objective()
  optim: OptimSettings = OptimSettings()
  diagnostics: DiagnosticsSettings = DiagnosticsSettings()
  eval: EvalSettings = EvalSettings()
  checkpoint: CheckpointSettings = CheckpointSettings()
  log: LogSettings = LogSettings()
  profile: ProfileSettings = ProfileSettings()
  stop: StopSettings = StopSettings()
  mesh: MeshSettings = MeshSettings()


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
