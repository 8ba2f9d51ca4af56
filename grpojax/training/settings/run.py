"""Training settings: optimizer, diagnostics, checkpoints, logging, stopping."""

from typing import Any

from grpojax.core.objective import Objective
from grpojax.core.optim import MOMENTS, OPTIMIZERS, SCHEDULES
from grpojax.core.options import (
  DECAY,
  NOT_NEGATIVE,
  ONE_OR_MORE,
  POSITIVE,
  frozen_options,
  option,
)
from grpojax.core.update import UpdateOptions
from grpojax.runtime.cli.settings import inline
from grpojax.runtime.terminal.trackers import TENSORBOARD
from grpojax.training.settings.inputs import (
  DataSettings,
  DifficultySettings,
  EnvironmentSettings,
  FilterGroupsSettings,
  LoraSettings,
  ModelSettings,
  RewardSettings,
  SamplingSettings,
)

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
  learning_rate: float = option(3e-4, "highest learning rate", within=POSITIVE)
  schedule: str = option(
    "constant", "course of the learning rate after its warmup", SCHEDULES
  )
  warmup_steps: int = option(
    0,
    "optimizer updates of a linear warmup; the first is at learning_rate / "
    "(warmup_steps + 1)",
    within=NOT_NEGATIVE,
  )
  b1: float = option(0.9, "decay of the first moment", within=DECAY)
  b2: float = option(0.95, "decay of the second moment", within=DECAY)
  weight_decay: float = option(
    0.0,
    "decoupled weight decay of all trained parameters but norms and biases",
    within=NOT_NEGATIVE,
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

  start: int = option(
    8, "the first group size, with batch_size prompts", within=ONE_OR_MORE
  )
  smallest: int = option(4, "smallest group size", within=ONE_OR_MORE)
  largest: int = option(32, "largest group size", within=ONE_OR_MORE)
  decay: float = option(
    0.9, "weight of past estimates at each diagnosis", within=DECAY
  )
  margin: float = option(
    0.25, "hysteresis before a move, in powers of two", within=NOT_NEGATIVE
  )
  confidence: float = option(
    1.0, "standard errors of evidence before a move", within=NOT_NEGATIVE
  )


@frozen_options
class DiagnosticsSettings:
  """Noise of the gradient, and the group size that it asks for."""

  every: int = option(
    0,
    "steps between diagnoses; 0 = off: nothing compiled or run",
    within=NOT_NEGATIVE,
  )
  tangents: int = option(
    4, "random directions; their spread gives the error", within="[2, inf)"
  )
  share: float = option(
    0.375, "share of a step's prompts, at least 3 of them", within="(0, 1]"
  )
  last_layers: int = option(
    0, "only the scores of so many last layers; 0 = all", within=NOT_NEGATIVE
  )


@frozen_options
class EvalSettings:
  """Greedy evaluations on held-out prompts."""

  every: int = option(5, "steps between evaluations", within=ONE_OR_MORE)
  num_prompts: int = option(
    256, "held-out prompts, the same each time", within=ONE_OR_MORE
  )
  batch_size: int = option(128, "prompts decoded at once", within=ONE_OR_MORE)
  samples: int = option(4, "completions shown and kept", within=NOT_NEGATIVE)


@frozen_options
class CheckpointSettings:
  """State, saved along the way."""

  every: int = option(10, "steps between checkpoints", within=ONE_OR_MORE)
  keep: int = option(2, "newest checkpoints on disk", within=ONE_OR_MORE)
  best: bool = option(
    False,
    "also keep the state of the highest held-out accuracy, and make it model/",
  )


@frozen_options
class LogSettings:
  """Records that are written along the way."""

  every: int = option(
    1,
    "steps between lines of progress; in long evaluations, batches",
    within=ONE_OR_MORE,
  )
  samples_every: int = option(
    10, "steps between completions that are written", within=ONE_OR_MORE
  )
  sample_groups: int = option(
    4, "groups of them that are written; 0 = none", within=NOT_NEGATIVE
  )
  report_every: int = option(
    0, "steps between reports; 0 = only at the end", within=NOT_NEGATIVE
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

  skipped_updates: int = option(
    10, "with gradients that are not finite; 0 = never", within=NOT_NEGATIVE
  )
  rewards_missing: int = option(
    10, "without any reward; 0 = never", within=NOT_NEGATIVE
  )
  zero_variance_groups: int = option(
    100,
    "without two rewards that differ in a group; 0 = never",
    within=NOT_NEGATIVE,
  )
  truncated: int = option(
    0, "with most completions cut off; 0 = never", within=NOT_NEGATIVE
  )
  few_effective_samples: int = option(
    0,
    "whose weights leave less than a tenth of the samples (sampling.ahead, "
    "int8, loss.correction); 0 = never",
    within=NOT_NEGATIVE,
  )
  no_improvement: int = option(
    0,
    "evaluations, not steps, without a higher held-out accuracy: the run ends "
    "early, with its model; 0 = never",
    within=NOT_NEGATIVE,
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
  sampling_tensor: int = option(
    0,
    "tensor while sampling, where nothing is gathered; 0 = mesh.tensor",
    within=NOT_NEGATIVE,
  )
  sampling_devices: int = option(
    0,
    "devices beside those of the axes, which sample the next step meanwhile; "
    "asks for sampling.ahead = 1; 0 = all devices do both",
    within=NOT_NEGATIVE,
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
  batch_size: int = option(32, "prompts a step", within=ONE_OR_MORE)
  group_size: int | str = option(
    8,
    "completions a prompt, or auto, which follows the best size "
    "(auto_group_size)",
    within=ONE_OR_MORE,
    words=(AUTO,),
  )
  model: ModelSettings = ModelSettings()
  lora: LoraSettings = LoraSettings()
  data: DataSettings = DataSettings()
  difficulty: DifficultySettings = DifficultySettings()
  sampling: SamplingSettings = SamplingSettings()
  environment: EnvironmentSettings = EnvironmentSettings()
  reward: RewardSettings = RewardSettings()
  filter_groups: FilterGroupsSettings = FilterGroupsSettings()
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
