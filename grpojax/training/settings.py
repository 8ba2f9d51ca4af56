"""The settings of a training run, each with its default and what it is."""

import dataclasses

from grpojax.core.advantages import ADVANTAGES
from grpojax.runtime.settings import section, setting
from grpojax.runtime.trackers import TENSORBOARD, TRACKERS
from grpojax.training import settings_input, settings_loss
from grpojax.training.group_sizes import AUTO
from grpojax.training.settings_input import NOT_NEGATIVE, ONE, POSITIVE

_AUTO_GROUP_SIZE = section(
  "group_size=auto: powers of two towards the best size, at equal samples",
  start=setting(8, "the first group size, with batch_size prompts", within=ONE),
  smallest=setting(4, "smallest group size", within=ONE),
  largest=setting(32, "largest group size", within=ONE),
  decay=setting(
    0.9, "weight of past estimates at each diagnosis", within="[0, 1)"
  ),
  margin=setting(
    0.25, "hysteresis before a move, in powers of two", within=NOT_NEGATIVE
  ),
  confidence=setting(
    1.0, "standard errors of evidence before a move", within=NOT_NEGATIVE
  ),
)

_SCORE_NORMS = section(
  "advantage=norm_ratio: lengths of scores, learned from the diagnoses",
  decay=setting(
    0.9, "weight of past estimates at each diagnosis", within="[0, 1)"
  ),
)

_DIAGNOSTICS = section(
  "the noise of the gradient, and the group size that it asks for",
  every=setting(
    0,
    "steps between diagnoses; 0 = off: nothing compiled or run",
    within=NOT_NEGATIVE,
  ),
  tangents=setting(
    4, "random directions; their spread gives the error", within="[2, inf)"
  ),
  share=setting(
    0.375, "share of a step's prompts, at least 3 of them", within="(0, 1]"
  ),
  last_layers=setting(
    0, "only the scores of so many last layers; 0 = all", within=NOT_NEGATIVE
  ),
)

_EVAL = section(
  "greedy evaluations on held-out prompts",
  every=setting(5, "steps between evaluations", within=ONE),
  num_prompts=setting(256, "held-out prompts, the same each time", within=ONE),
  batch_size=setting(128, "prompts decoded at once", within=ONE),
  samples=setting(4, "completions shown", within=NOT_NEGATIVE),
)

_CHECKPOINT = section(
  "the state, saved along the way",
  every=setting(10, "steps between checkpoints", within=ONE),
  keep=setting(2, "newest checkpoints on disk", within=ONE),
  best=setting(
    False,
    "also keep the state of the highest held-out accuracy, and make it model/",
  ),
)

_LOG = section(
  "what is written along the way",
  every=setting(
    1,
    "steps between lines of progress; in long evaluations, batches",
    within=ONE,
  ),
  samples_every=setting(
    10, "steps between completions that are written", within=ONE
  ),
  sample_groups=setting(
    4, "groups of them that are written; 0 = none", within=NOT_NEGATIVE
  ),
  report_every=setting(
    0, "steps between reports; 0 = only at the end", within=NOT_NEGATIVE
  ),
  trackers=setting(
    (TENSORBOARD,), "where the metrics go besides the run directory", TRACKERS
  ),
)

_PROFILE = section(
  "a trace of some steps, for xprof and TensorBoard",
  steps=setting("", 'FIRST:LAST, the steps traced into RUN/profile; "" = none'),
)

_STOP = section(
  "the run ends after so many steps in a row; 0 = never",
  skipped_updates=setting(
    10, "with gradients that are not finite; 0 = never", within=NOT_NEGATIVE
  ),
  rewards_missing=setting(
    10, "without any reward; 0 = never", within=NOT_NEGATIVE
  ),
  zero_variance_groups=setting(
    100,
    "without two rewards that differ in a group; 0 = never",
    within=NOT_NEGATIVE,
  ),
  truncated=setting(
    0, "with most completions cut off; 0 = never", within=NOT_NEGATIVE
  ),
  no_improvement=setting(
    0,
    "evaluations, not steps, without a higher held-out accuracy: the run ends "
    "early, with its model; 0 = never",
    within=NOT_NEGATIVE,
  ),
)

_MESH = section(
  "devices along each axis; -1 = all the others",
  data=setting(-1, "devices that cut the rows of a batch"),
  fsdp=setting(
    1,
    "devices that cut the rows, and parameters with their optimizer state, "
    "gathered by each layer while it runs",
  ),
  expert=setting(1, "devices that cut the rows, and the experts"),
  tensor=setting(1, "devices that cut heads, the MLP and the vocabulary"),
  sampling_tensor=setting(
    0,
    "tensor while sampling, where nothing is gathered; 0 = mesh.tensor",
    within=NOT_NEGATIVE,
  ),
)

_MOST_CHANGED = (
  "name",
  "model.path",
  "data.name",
  "data.path",
  "data.max_prompt_length",
  "reward.functions",
  "steps",
  "batch_size",
  "group_size",
  "sampling.max_new_tokens",
  "sampling.temperature",
  "advantage",
  "loss.beta",
  "lora.rank",
  "optim.learning_rate",
  "optim.micro_batches",
)

_ALL = section(
  "the run",
  name=setting(
    "arithmetic",
    "name of the run; its directory is runs/NAME without --run_dir",
  ),
  seed=setting(0, "seed of all random numbers", within="[0, 2**32)"),
  commits=setting(
    (),
    "commits of what is from the Hub: KIND:ORG/NAME@REVISION=COMMIT, ...; the "
    "run fills it in",
  ),
  steps=setting(
    40, "training steps; a finished run goes on with more", within="[0, 2**31)"
  ),
  batch_size=setting(32, "prompts a step", within=ONE),
  group_size=setting(
    8,
    "completions a prompt, or auto, which follows the best size "
    "(auto_group_size)",
    within=ONE,
    words=(AUTO,),
  ),
  advantage=setting(
    "leave_one_out", "what of a group's rewards is learned from", ADVANTAGES
  ),
  subset_size=setting(2, "k of max_at_k and min_at_k", within=ONE),
  score_power=setting(
    2.0, "power of score_weighted's weights", within=POSITIVE
  ),
  logits_chunk=setting(
    256,
    "tokens whose logits a device holds at once; less takes less memory",
    within="[1, 2**31)",
  ),
  **settings_input.SECTIONS,
  auto_group_size=_AUTO_GROUP_SIZE,
  score_norms=_SCORE_NORMS,
  **settings_loss.SECTIONS,
  diagnostics=_DIAGNOSTICS,
  eval=_EVAL,
  checkpoint=_CHECKPOINT,
  log=_LOG,
  profile=_PROFILE,
  stop=_STOP,
  mesh=_MESH,
)

SETTINGS = dataclasses.replace(_ALL, first=_MOST_CHANGED)
