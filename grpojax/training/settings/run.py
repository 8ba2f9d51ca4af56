"""Training settings: optimizer, diagnostics, checkpoints, logging, stopping."""

from typing import Any

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
from grpojax.training.settings import inputs

AUTO = "auto"  # group_size: follow the best one


@frozen_options
class OptimSettings:
  """Optimizer, learning rate, and division of a step into updates."""

  name: str = option(
    "adamw", "the optimizer; adafactor has b2, but no b1", OPTIMIZERS
  )
  moments_dtype: str = option(
    "float32",
    "format of AdamW's two moments between updates; bfloat16 is rounded at "
    "random",
    MOMENTS,
  )
  learning_rate: float = positive(3e-4, "highest learning rate")
  schedule: str = option(
    "constant", "course of the learning rate after its warmup", SCHEDULES
  )
  warmup_steps: int = not_negative(
    0,
    "optimizer updates of a linear warmup; the first is at learning_rate / "
    "(warmup_steps + 1)",
  )
  b1: float = option(0.9, "decay of the first moment", within=DECAY)
  b2: float = option(0.95, "decay of the second moment", within=DECAY)
  weight_decay: float = not_negative(
    0.0, "decoupled weight decay of all trained parameters but norms and biases"
  )
  update: UpdateOptions = inline(
    UpdateOptions(max_grad_norm=1.0, micro_batches=4)
  )
  packing: bool = option(
    True,
    "short completions of a group share rows: padding costs little, other "
    "lengths may compile",
  )


@frozen_options
class AutoGroupSizeSettings:
  """Powers of two towards the best size, at equal samples (group_size=auto)."""

  start: int = one_or_more(8, "the first group size, with batch_size prompts")
  smallest: int = one_or_more(4, "smallest group size")
  largest: int = one_or_more(32, "largest group size")
  decay: float = option(
    0.9, "weight of past estimates at each diagnosis", within=DECAY
  )
  margin: float = not_negative(
    0.25, "hysteresis before a move, in powers of two"
  )
  confidence: float = not_negative(
    1.0, "standard errors of evidence before a move"
  )


@frozen_options
class DiagnosticsSettings:
  """Noise of the gradient, and the group size that it asks for."""

  every: int = not_negative(
    0, "steps between diagnoses; 0 = off: nothing compiled or run"
  )
  tangents: int = option(
    4, "random directions; their spread gives the error", within="[2, inf)"
  )
  share: float = option(
    0.375, "share of a step's prompts, at least 3 of them", within="(0, 1]"
  )
  last_layers: int = not_negative(
    0, "only the scores of so many last layers; 0 = all"
  )


@frozen_options
class EvalSettings:
  """Greedy evaluations on held-out prompts."""

  every: int = one_or_more(5, "steps between evaluations")
  num_prompts: int = one_or_more(256, "held-out prompts, the same each time")
  batch_size: int = one_or_more(128, "prompts decoded at once")
  samples: int = not_negative(4, "completions shown and kept")


@frozen_options
class CheckpointSettings:
  """State, saved along the way."""

  every: int = one_or_more(10, "steps between checkpoints")
  keep: int = one_or_more(2, "newest checkpoints on disk")
  best: bool = option(
    False,
    "also keep the state of the highest held-out accuracy, and make it model/",
  )


@frozen_options
class LogSettings:
  """Records that are written along the way."""

  every: int = one_or_more(
    1, "steps between lines of progress; in long evaluations, batches"
  )
  samples_every: int = one_or_more(
    10, "steps between completions that are written"
  )
  sample_groups: int = not_negative(
    4, "groups of them that are written; 0 = none"
  )
  report_every: int = not_negative(
    0, "steps between reports; 0 = only at the end"
  )
  trackers: tuple[Any, ...] = option(
    (TENSORBOARD,),
    "where the metrics go besides the run directory: tensorboard, wandb, or "
    "your own as path/to/file.py:FUNCTION",
  )


@frozen_options
class ProfileSettings:
  """Trace of some steps, for xprof and TensorBoard."""

  steps: str = option(
    "", 'FIRST:LAST, the steps traced into RUN/profile; "" = none'
  )


@frozen_options
class StopSettings:
  """Steps in a row after which the run ends; 0 = never."""

  skipped_updates: int = not_negative(
    10, "with gradients that are not finite; 0 = never"
  )
  rewards_missing: int = not_negative(10, "without any reward; 0 = never")
  zero_variance_groups: int = not_negative(
    100, "without two rewards that differ in a group; 0 = never"
  )
  truncated: int = not_negative(0, "with most completions cut off; 0 = never")
  few_effective_samples: int = not_negative(
    0,
    "whose weights leave less than a tenth of the samples (sampling.ahead, "
    "int8, loss.correction); 0 = never",
  )
  no_improvement: int = not_negative(
    0,
    "evaluations, not steps, without a higher held-out accuracy: the run ends "
    "early, with its model; 0 = never",
  )


@frozen_options
class MeshSettings:
  """Devices along each axis; -1 = all the others."""

  data: int = option(-1, "devices that cut the rows of a batch")
  fsdp: int = option(
    1,
    "devices that cut the rows, and parameters with their optimizer state, "
    "gathered by each layer while it runs",
  )
  expert: int = option(1, "devices that cut the rows, and the experts")
  tensor: int = option(1, "devices that cut heads, the MLP and the vocabulary")
  sampling_tensor: int = not_negative(
    0, "tensor while sampling, where nothing is gathered; 0 = mesh.tensor"
  )
  sampling_devices: int = not_negative(
    0,
    "devices beside those of the axes, which sample the next step meanwhile; "
    "asks for sampling.ahead = 1; 0 = all devices do both",
  )


@frozen_options
class TrainSettings:
  """Settings of a training run.

  In a config some of the settings of `loss` and `optim` stand at the top (see
  `training.config.AT_TOP`), and inline ones in the section that they are in.
  """

  name: str = option(
    "arithmetic",
    "name of the run; its directory is runs/NAME without --run_dir",
  )
  seed: int = option(0, "seed of all random numbers", within="[0, 2**32)")
  commits: tuple[Any, ...] = option(
    (),
    "commits of what is from the Hub: KIND:ORG/NAME@REVISION=COMMIT, ...; the "
    "run fills it in",
  )
  allow_changed_inputs: bool = option(
    False,
    "resume with other data, reward files or tokenizer than before, in the "
    "place of refusing them",
  )
  steps: int = option(
    40, "training steps; a finished run goes on with more", within="[0, 2**31)"
  )
  batch_size: int = one_or_more(32, "prompts a step")
  group_size: int | str = one_or_more(
    8,
    "completions a prompt, or auto, which follows the best size "
    "(auto_group_size)",
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
