"""Settings of what a step reads: model, data, completions and their rewards."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.core.advantages.multi_reward import AGGREGATIONS
from grpojax.core.decoding import Decoding
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.options import (
  frozen_options,
  not_negative,
  one_or_more,
  option,
  positive,
)
from grpojax.core.turns import CREDITS
from grpojax.data.datasets import DATASETS
from grpojax.environments.spaces import ACTIONS
from grpojax.environments.tools import TOOL_CALLS
from grpojax.models.config import DTYPES
from grpojax.models.layer_stacks import REMAT
from grpojax.models.row_attention import ATTENTION
from grpojax.rewards.math import THINKING
from grpojax.runtime.cli.settings import free_field, inline
from grpojax.runtime.text.special_tokens import SPECIAL_TOKENS
from grpojax.statistics.success_rates import PRIORITIES

REFERENCE_MEMORY = {"device": None, "host": "pinned_host"}
"""JAX's kinds of memory by the names of `model.reference`."""

DIFFICULTY_OFF = "none"

FILTER_METRICS = ("reward", "acc")
"""Quantities that have to vary in a group: `reward`, by which its completions
are compared; `acc`, the function that says what a right answer is. With several
rewards `acc` leaves groups out that would teach something, and the objective is
another."""


@frozen_options
class ModelSettings:
  """Policy, and the reference that it is held to."""

  path: str = option(
    "arithmetic-instruct",
    "a Hugging Face directory, the name of an embedded model, ORG/NAME of the "
    "Hugging Face Hub, FILE.gguf, or package:NAME/FILE.gguf, a file in an "
    "installed Python package",
  )
  revision: str = option(
    "", 'of ORG/NAME on the Hub: a branch, a tag or a commit; "" = main'
  )
  ignore_keys: tuple[Any, ...] = option(
    (),
    "unknown keys of config.json, the teacher's and reward model's as well, "
    "that do not change what the model computes",
  )
  dtype: str = option(
    "float32",
    "format of computation; what is trained is float32 anyway, what is frozen "
    "(with LoRA) has this format",
    DTYPES,
  )
  remat: str = option(
    "selective",
    "what the backward pass computes again to save memory: nothing; softmax "
    "weights and activations; an MLP's products as well; all but each layer's "
    "input",
    REMAT,
  )
  attention: str = option(
    "auto",
    "attention of rows of more than 256 tokens: kernels on TPUs and GPUs, "
    "blocks on CPUs; the whole row at once, as shorter ones; blocks in plain "
    "JAX; kernels",
    ATTENTION,
  )
  teacher: str = option(
    "",
    "another model that loss.beta holds the policy to, as model.path; it reads "
    'the same tokens; "" is the policy before the first step',
  )
  reference_prompt: str = option(
    "",
    "what the reference reads in the place of a prompt: {prompt} and fields of "
    'the example, as in "{prompt} (the answer is {answer})"; "" is the prompt',
  )
  reference: str = option(
    "device",
    "where the reference policy is kept: on the devices, or in the host's "
    "memory but for its own pass",
    REFERENCE_MEMORY,
  )
  reference_every: int = not_negative(
    0, "steps after which the reference follows the policy; 0 = it is fixed"
  )
  reference_mix: float = option(
    1.0,
    "the policy's share of the new reference then; 1 = a copy of the policy",
    within="(0, 1]",
  )


@frozen_options
class LoraSettings:
  """Low-rank adapters, which are trained in the place of the weights."""

  rank: int = not_negative(0, "rank of the adapters; 0 = off: all is trained")
  alpha: float = positive(32.0, "adapters are scaled by alpha / rank")
  targets: str = option(
    "layers/(q|k|v|o|gate|up|down)",
    "a regular expression of the paths of the weights that have adapters",
  )


@frozen_options
class DataSettings:
  """Prompts, and how they become tokens."""

  name: str = option("arithmetic", "the data set", DATASETS)
  path: str = option(
    "",
    "of data in files: a file, a directory, or a pattern of files; of "
    "huggingface: ORG/NAME of the Hub",
  )
  options: Mapping[str, Any] = free_field(
    "keyword arguments of the data set's load"
  )
  mixture: Mapping[str, Any] = free_field(
    "several data sets in the place of that one: mixture.ANY.name, path, "
    "options, weight, and rewards (those of reward.functions that score it)"
  )
  max_prompt_length: int = not_negative(
    0,
    "longest prompt, tokens with the template; 0 = as the data have it, which "
    "the run finds out and fills in",
  )
  too_long: str = option(
    "refuse", "what is done about prompts of more tokens", ("refuse", "drop")
  )
  template: str = option(
    "{prompt}\n", "what a plain prompt becomes (a chat has its own template)"
  )
  system_prompt: str = option(
    "", 'system prompt of chats without one; "" = none'
  )
  special_tokens: str = option(
    "text",
    'what "<|im_end|>" in a prompt is: text, or the control token of that name',
    SPECIAL_TOKENS,
  )
  template_options: Mapping[str, Any] = free_field(
    "keyword arguments of the chat template"
  )


@frozen_options
class DifficultySettings:
  """Prompts drawn by their success rates."""

  priority: str = option(
    DIFFICULTY_OFF,
    "what of its success rate makes a prompt wanted",
    (DIFFICULTY_OFF, *PRIORITIES),
  )
  uniform: float = option(
    0.1, "share of prompts that is drawn as always", within="(0, 1]"
  )
  half_life: float = positive(
    100.0, "steps after which what was seen counts half"
  )
  band: tuple[Any, ...] = option(
    (0.1, 0.9), "success rates that priority=band wants: low, high"
  )
  target: tuple[Any, ...] = option(
    (0.8, 0.3),
    "success rate that priority=target wants at the first and the last step",
  )
  rows: int = one_or_more(1, "groups of a step that one prompt may have")
  importance_weights: bool = option(
    False, "undo the choice in the loss, so that the objective stays the same"
  )


@frozen_options
class SamplingSettings:
  """Completions (the first eight settings and ahead change samples)."""

  max_new_tokens: int = one_or_more(80, "longest completion, tokens")
  stop: tuple[Any, ...] = option(
    (),
    'texts that end a completion, as ["\\nQuestion:", "</answer>"]; rewards '
    "see the text before; () = none",
  )
  distribution: Sampling = inline(Sampling())
  decoding: Decoding = inline(Decoding())
  parts: int = one_or_more(
    1,
    "equal parts of a step's prompts, sampled one after another: "
    "reward.workers are at one while the next decodes",
  )
  ahead: int = option(
    0,
    "1 = a step's completions are drawn before the update of the last one, and "
    "rewarded while the devices are at it; asks for loss.correction",
    within="[0, 1]",
  )


@frozen_options
class RewardSettings:
  """Rewards of the completions."""

  functions: tuple[Any, ...] = option(
    ("exact_answer",),
    'built in, "package.module:function" or "file.py:function"; the first says '
    "what a right answer is (1 or more), which evaluations count",
  )
  weights: tuple[Any, ...] = option(
    (1.0,), "weights of the functions in the sum, a number for each"
  )
  options: Mapping[str, Any] = free_field(
    "keyword arguments of a function: options.FUNCTION.key"
  )
  workers: int = option(
    0,
    "processes of this machine that compute rewards; 0 = this one does, or one "
    "more with math_answer",
    within="[0, 1024]",
  )
  timeout: float = positive(
    30.0, "seconds that the reward of a completion may take"
  )
  thinking: tuple[Any, ...] = option(
    THINKING,
    "pairs of tags, each OPENING...CLOSING, around text that math_answer does "
    "not read",
  )
  model: str = option(
    "",
    "a reward model (sequence classifier): a directory, or ORG/NAME[@REVISION] "
    'of the Hub; "" = none',
  )
  model_weight: float = option(1.0, "weight of the reward model in the sum")
  on_device: bool = option(
    False, "score token ids on the device: the whole step is one XLA program"
  )
  aggregation: str = option(
    "sum_then_normalize",
    "compare several functions by their weighted sum, or each normalised in "
    "its group before it (GDPO)",
    AGGREGATIONS,
  )


@frozen_options
class EnvironmentSettings:
  """Environment or tools that answer between turns of the model."""

  path: str = option(
    "",
    'built in, "gymnasium:ID", "file.py", "file.py:Name" or '
    '"package.module:Name"; "" = none, but for tools',
  )
  tools: tuple[Any, ...] = option(
    (), 'functions that the model may call, each "file.py:function"'
  )
  tool_format: str = option("hermes", "how the model writes a call", TOOL_CALLS)
  options: Mapping[str, Any] = free_field(
    "keyword arguments of the environment"
  )
  action: str = option(
    "auto",
    "form of the action that the `step` of a class gets: the turn's text, its "
    "last number or its last JSON value; auto = by the action_space, and text "
    "without one",
    ACTIONS,
  )
  max_turns: int = one_or_more(8, "turns of the longest trajectory")
  max_observation: int = not_negative(
    0,
    "largest number of tokens of an observation, at most half of "
    "sampling.max_new_tokens; 0 = half of it",
  )
  max_turn_tokens: int = not_negative(
    0, "tokens of a turn, which is cut there and answered; 0 = no such limit"
  )
  failed: str = option(
    "drop",
    "a trajectory whose environment fails: without reward and part, or with 0",
    ("drop", "zero"),
  )
  template: str = option(
    "\n{observation}\n",
    "what an observation becomes where the model has no chat template",
  )
  credit: str = option(
    "trajectory",
    "what a turn learns from: the whole trajectory's reward, or that of this "
    "turn and later ones, less the others' mean (of all, or of those that have "
    "such a turn); one expectation with loss.weighting fixed_length or "
    "sequence_sum only",
    CREDITS,
  )
  workers: int = option(
    0,
    "processes of this machine that run environments; 0 = this one does",
    within="[0, 1024]",
  )
  timeout: float = positive(30.0, "seconds that an answer may take")
  check: str = option(
    "actions",
    "how the start tries whether answers repeat: by made-up turns without "
    "calls, or also by calling each tool with made-up arguments",
    ("actions", "tools"),
  )

  @property
  def on(self) -> bool:
    """True where there is an environment."""
    return bool(self.path or self.tools)

  @property
  def failed_reward(self) -> float:
    """Reward of a trajectory whose environment fails; NaN is none."""
    return 0.0 if self.failed == "zero" else math.nan


@frozen_options
class FilterGroupsSettings:
  """Dynamic sampling (DAPO): fresh prompts for groups that do not vary."""

  enable: bool = option(False, "replace groups whose rewards are all equal")
  metric: str = option(
    "reward",
    "in what a group must vary: the reward, or the first function's (acc)",
    FILTER_METRICS,
  )
  max_num_gen_batches: int = one_or_more(10, "most batches drawn for one step")
  gen_parts: int = one_or_more(
    1, "further draws are of 1 / gen_parts of a batch"
  )
  rescale: bool = option(
    False, "scale the gradient to its length without this filter"
  )
