"""Settings of a step's inputs: model, data, sampling, environment, rewards."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.core.advantages.multi_reward import AGGREGATIONS
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
from grpojax.models.block_attention import ATTENTION
from grpojax.models.config import DTYPES
from grpojax.models.layer_stacks import REMAT
from grpojax.rewards.math import THINKING
from grpojax.runtime.cli.settings import free_field, inline
from grpojax.runtime.text.special_tokens import SPECIAL_TOKENS
from grpojax.statistics.success_rates import PRIORITIES

REFERENCE_MEMORY = {"device": None, "host": "pinned_host"}
"""JAX memory kind for each choice of `model.reference`."""

DIFFICULTY_OFF = "none"


@frozen_options
class ModelSettings:
  """Policy and reference model."""

  path: str = option(
    "arithmetic-instruct",
    "Hugging Face directory, embedded model, ORG/NAME on the Hub, FILE.gguf, "
    "or package:NAME/FILE.gguf, a file in an installed Python package",
  )
  revision: str = option(
    "", 'branch, tag or commit of ORG/NAME on the Hub; "" = main'
  )
  ignore_keys: tuple[Any, ...] = option(
    (), "unknown keys of config.json to ignore (policy, teacher, reward model)"
  )
  dtype: str = option(
    "float32",
    "data type of computation and frozen weights; trained weights are float32",
    DTYPES,
  )
  remat: str = option(
    "selective",
    "recomputed in the backward pass: attention = softmax weights and "
    "activation functions; selective = also MLP products; full = everything",
    REMAT,
  )
  attention: str = option(
    "auto",
    "attention in rows of more than 256 tokens: auto = kernel on TPUs and GPUs "
    "and blocks on CPUs; plain = the whole row at once; blocks are plain JAX",
    ATTENTION,
  )
  teacher: str = option(
    "",
    "reference model for loss.beta, given as in model.path, with the policy's "
    'token ids; "" = the policy before the first step',
  )
  reference_prompt: str = option(
    "",
    "alternative prompt of the reference: {prompt} and fields of the "
    'example, as in "{prompt} (the answer is {answer})"; "" = the same prompt',
  )
  reference: str = option(
    "device",
    "memory of the reference; host copies it to the devices for its pass",
    REFERENCE_MEMORY,
  )
  reference_every: int = not_negative(
    0, "steps between updates of the reference; 0 = fixed reference"
  )
  reference_mix: float = option(
    1.0, "policy's weight in an updated reference; 1 = copy", within="(0, 1]"
  )


@frozen_options
class LoraSettings:
  """Low-rank adapters, trained in place of the weights."""

  rank: int = not_negative(0, "rank of the adapters; 0 = full fine-tuning")
  alpha: float = positive(32.0, "adapter scale, alpha / rank")
  targets: str = option(
    "layers/(q|k|v|o|gate|up|down)", "regex for paths of adapted weights"
  )


@frozen_options
class DataSettings:
  """Prompts and their tokenization."""

  name: str = option("arithmetic", "data set", DATASETS)
  path: str = option(
    "", "data file, directory or glob pattern; huggingface: ORG/NAME on the Hub"
  )
  options: Mapping[str, Any] = free_field("keyword arguments of the data set")
  mixture: Mapping[str, Any] = free_field(
    "several data sets instead of data.name: mixture.ANY.name, path, options, "
    "weight, rewards (the reward.functions that score it)"
  )
  max_prompt_length: int = not_negative(
    0,
    "maximum tokens per prompt, with template; 0 = longest prompt of the data",
  )
  too_long: str = option(
    "refuse", "treatment of longer prompts", ("refuse", "drop")
  )
  template: str = option(
    "{prompt}\n", "template of plain-text prompts; chats use the chat template"
  )
  system_prompt: str = option(
    "", 'system prompt for chats without their own; "" = none'
  )
  special_tokens: str = option(
    "text",
    'meaning of "<|im_end|>" in prompts: plain text, or the control token',
    SPECIAL_TOKENS,
  )
  template_options: Mapping[str, Any] = free_field("chat template arguments")


@frozen_options
class DifficultySettings:
  """Prompts drawn by their success rates."""

  priority: str = option(
    DIFFICULTY_OFF,
    "dependence of a prompt's sampling priority on its success rate",
    (DIFFICULTY_OFF, *PRIORITIES),
  )
  uniform: float = option(
    0.1, "share of prompts drawn without priorities", within="(0, 1]"
  )
  half_life: float = positive(100.0, "half-life of past results, in steps")
  band: tuple[Any, ...] = option(
    (0.1, 0.9), "success rates for priority=band: low, high"
  )
  target: tuple[Any, ...] = option(
    (0.8, 0.3), "success rates for priority=target: first step, last step"
  )
  rows: int = one_or_more(1, "maximum groups per prompt and step")
  importance_weights: bool = option(
    False, "importance weights in the loss, for an unchanged objective"
  )


@frozen_options
class SamplingSettings:
  """Completions (only the first eight settings and ahead change samples)."""

  max_new_tokens: int = one_or_more(80, "maximum tokens per completion")
  stop: tuple[Any, ...] = option(
    (),
    'stop strings, as in ["\\nQuestion:", "</answer>"]; rewards see the text '
    "before; () = none",
  )
  distribution: Sampling = inline(Sampling())
  parts: int = one_or_more(
    1,
    "equal parts in which a step's prompts are sampled; reward.workers score "
    "each part while the next is decoded",
  )
  ahead: int = option(
    0,
    "steps to sample ahead; with 1 the next step is sampled before the update "
    "and scored during it, which needs loss.correction",
    within="[0, 1]",
  )


@frozen_options
class RewardSettings:
  """Rewards of the completions."""

  functions: tuple[Any, ...] = option(
    ("exact_answer",),
    'reward functions: built in, "package.module:function" or '
    '"file.py:function"; accuracy counts how often the first gives 1 or more',
  )
  weights: tuple[Any, ...] = option((1.0,), "weight of each reward function")
  options: Mapping[str, Any] = free_field(
    "keyword arguments of a function: options.FUNCTION.key"
  )
  workers: int = option(
    0,
    "processes per machine for rewards; 0 = the main one, or 1 for math_answer",
    within="[0, 1024]",
  )
  timeout: float = positive(30.0, "time limit per completion, seconds")
  thinking: tuple[Any, ...] = option(
    THINKING,
    "tag pairs OPENING...CLOSING around text ignored by math_answer",
  )
  model: str = option(
    "", 'sequence classifier: directory or ORG/NAME[@REVISION]; "" = none'
  )
  model_weight: float = option(1.0, "weight of the reward model in the sum")
  on_device: bool = option(
    False, "scoring of token ids on the device: a single XLA program per step"
  )
  aggregation: str = option(
    "sum_then_normalize",
    "order of summing rewards and normalising each in its group (GDPO)",
    AGGREGATIONS,
  )


@frozen_options
class EnvironmentSettings:
  """Environment or tools that answer between turns of the model."""

  path: str = option(
    "",
    'environment: built in, "gymnasium:ID", "file.py", "file.py:Name" or '
    '"package.module:Name"; "" = none, unless there are tools',
  )
  tools: tuple[Any, ...] = option(
    (), 'tools of the model, each "file.py:function"'
  )
  tool_format: str = option("hermes", "syntax of tool calls", TOOL_CALLS)
  options: Mapping[str, Any] = free_field("arguments of the environment")
  action: str = option(
    "auto",
    "action passed to `step` of a class: the turn's text, its last number or "
    "its last JSON value; auto = by its action_space, or text without one",
    ACTIONS,
  )
  max_turns: int = one_or_more(8, "maximum turns per trajectory")
  max_observation: int = not_negative(
    0, "maximum tokens per observation, up to half of max_new_tokens; 0 = half"
  )
  max_turn_tokens: int = not_negative(
    0, "tokens after which a turn is cut off and answered; 0 = no limit"
  )
  failed: str = option(
    "drop", "failed trajectories: dropped or reward 0", ("drop", "zero")
  )
  template: str = option(
    "\n{observation}\n", "template of observations without a chat template"
  )
  credit: str = option(
    "trajectory",
    "reward of a turn: the trajectory's; or rewards from this turn on, less "
    "their mean in other samples (all, or those with this turn). Expectations "
    "are equal only with loss.weighting fixed_length or sequence_sum",
    CREDITS,
  )
  workers: int = option(
    0,
    "processes per machine that run environments; 0 = the main process",
    within="[0, 1024]",
  )
  timeout: float = positive(30.0, "time limit per answer, seconds")
  check: str = option(
    "actions",
    "test at the start whether answers are reproducible: made-up turns without "
    "tool calls, or also a call of each tool with made-up arguments",
    ("actions", "tools"),
  )

  @property
  def on(self) -> bool:
    """True with an environment or tools."""
    return bool(self.path or self.tools)

  @property
  def failed_reward(self) -> float:
    """Reward of a trajectory whose environment failed; NaN drops it."""
    return 0.0 if self.failed == "zero" else math.nan


@frozen_options
class FilterGroupsSettings:
  """Dynamic sampling (DAPO): new prompts for groups of equal rewards."""

  enable: bool = option(False, "replacement of groups with equal rewards")
  # With several rewards `acc` also drops groups that have a gradient.
  metric: str = option(
    "reward",
    "quantity that must vary in a group; acc = first reward function",
    ("reward", "acc"),
  )
  max_num_gen_batches: int = one_or_more(10, "maximum batches per step")
  gen_parts: int = one_or_more(1, "parts of a batch in further draws")
  rescale: bool = option(
    False, "multiply gradients by group_acceptance, to undo the filter's scale"
  )
