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
    "Hugging Face directory, bundled model, ORG/NAME on the Hub, FILE.gguf, or "
    "package:NAME/FILE.gguf for a file in an installed Python package",
  )
  revision: str = option(
    "", 'branch, tag or commit of ORG/NAME on the Hub; "" = main'
  )
  ignore_keys: tuple[Any, ...] = option(
    (), "keys of a model's config.json to ignore if grpojax does not know them"
  )
  dtype: str = option(
    "float32",
    "data type of computation and frozen weights; trained weights are float32",
    DTYPES,
  )
  remat: str = option(
    "selective",
    "activations recomputed in the backward pass: attention = softmax weights "
    "and activation functions; selective = also MLP products; full = all",
    REMAT,
  )
  attention: str = option(
    "auto",
    "attention in rows over 256 tokens: plain = whole rows at once; blocks = "
    "key blocks, in JAX; kernel = fused; auto = blocks on CPUs, else kernel",
    ATTENTION,
  )
  teacher: str = option(
    "",
    "reference model of the KL term (loss.beta), named like model.path, with "
    'the same token ids; "" = the policy before the first step',
  )
  reference_prompt: str = option(
    "",
    "prompt template of the reference, with {prompt} and fields of the "
    'example: "{prompt} (the answer is {answer})"; "" = the policy\'s prompt',
  )
  reference: str = option(
    "device",
    "memory for the reference; host = copied to devices for each forward pass",
    REFERENCE_MEMORY,
  )
  reference_every: int = not_negative(
    0, "steps between updates of the reference; 0 = no updates"
  )
  reference_mix: float = option(
    1.0, "policy's share in each reference update; 1 = copy", within="(0, 1]"
  )


@frozen_options
class LoraSettings:
  """Low-rank adapters, trained instead of the weights."""

  rank: int = not_negative(0, "rank of the adapters; 0 = full fine-tuning")
  alpha: float = positive(32.0, "adapters are scaled by alpha / rank")
  targets: str = option(
    "layers/(q|k|v|o|gate|up|down)", "regex for the paths of adapted weights"
  )


@frozen_options
class DataSettings:
  """Prompts and their tokenization."""

  name: str = option("arithmetic", "data set", DATASETS)
  path: str = option(
    "", "data file, directory or glob pattern; for huggingface also ORG/NAME"
  )
  options: Mapping[str, Any] = free_field("keyword arguments of the data set")
  mixture: Mapping[str, Any] = free_field(
    "several data sets instead of data.name: mixture.NAME.name, .path, "
    ".options, .weight, .rewards (its reward.functions; default: all)"
  )
  max_prompt_length: int = not_negative(
    0, "maximum tokens per prompt, template included; 0 = longest prompt"
  )
  too_long: str = option(
    "refuse",
    "prompts over max_prompt_length: refuse = error; drop = leave out",
    ("refuse", "drop"),
  )
  template: str = option(
    "{prompt}\n", "template of plain-text prompts; chats use the chat template"
  )
  system_prompt: str = option(
    "", 'system prompt to add if a chat has none; "" = none'
  )
  special_tokens: str = option(
    "text",
    'control tokens such as "<|im_end|>" inside prompts: text = plain text; '
    "control = control tokens",
    SPECIAL_TOKENS,
  )
  template_options: Mapping[str, Any] = free_field("chat template arguments")


@frozen_options
class DifficultySettings:
  """Choice of prompts by their success rates."""

  priority: str = option(
    DIFFICULTY_OFF,
    "prompts to prefer: varies = groups whose rewards are likely to vary; "
    "spread = high standard deviation of the reward; band = success rate in "
    "difficulty.band; target = success rate near difficulty.target; none = off",
    (DIFFICULTY_OFF, *PRIORITIES),
  )
  uniform: float = option(
    0.1, "share of prompts drawn uniformly, not by priority", within="(0, 1]"
  )
  half_life: float = positive(100.0, "steps after which a reward counts half")
  band: tuple[Any, ...] = option(
    (0.1, 0.9), "lowest and highest success rate for priority = band"
  )
  target: tuple[Any, ...] = option(
    (0.8, 0.3), "success rate for priority = target: first step, last step"
  )
  rows: int = one_or_more(1, "maximum groups of a prompt in a step")
  importance_weights: bool = option(
    False, "weight the loss so that priorities do not change the objective"
  )


@frozen_options
class SamplingSettings:
  """Completions (`parts` does not change them)."""

  max_new_tokens: int = one_or_more(80, "maximum tokens per completion")
  stop: tuple[Any, ...] = option(
    (),
    'strings that end a completion, such as ["\\nQuestion:", "</answer>"]; '
    "rewards see the text before them; () = none",
  )
  distribution: Sampling = inline(Sampling())
  parts: int = one_or_more(
    1,
    "number of equal parts of a step's prompts; reward.workers score a part "
    "while the next one is decoded",
  )
  ahead: int = option(
    0,
    "1 = sample the completions of the next step before the update, and "
    "score them during the update (needs loss.correction); 0 = off",
    within="[0, 1]",
  )
  engine: tuple[Any, ...] = option(
    (),
    "vLLM servers that sample, each http://HOST:PORT (needs loss.correction, "
    "which without --config is then token_truncate); () = none",
  )
  engine_weights: str = option(
    "",
    "directory for the weights that the servers load, which must see it under "
    'the same path; "" = engine/ in the run directory',
  )
  engine_timeout: float = option(
    600.0,
    "seconds a server may take to answer, or to come back",
    within="(0, 1e9]",  # sockets refuse more
  )


@frozen_options
class RewardSettings:
  """Rewards of the completions."""

  functions: tuple[Any, ...] = option(
    ("exact_answer",),
    'reward functions: built-in name, "package.module:function" or '
    '"file.py:function"; accuracy is how often the first returns 1 or more',
  )
  weights: tuple[Any, ...] = option((1.0,), "weight of each reward function")
  options: Mapping[str, Any] = free_field(
    "keyword arguments of reward functions, as options.FUNCTION.KEY"
  )
  workers: int = option(
    0,
    "reward processes per machine; 0 = rewards in the main process, or one "
    "process if math_answer is used",
    within="[0, 1024]",
  )
  timeout: float = positive(30.0, "reward time limit, seconds per completion")
  thinking: tuple[Any, ...] = option(
    THINKING, "tags OPENING...CLOSING around text that math_answer ignores"
  )
  model: str = option(
    "", 'reward model (classifier): directory or ORG/NAME[@REVISION]; "" = none'
  )
  model_weight: float = option(1.0, "weight of the reward model's reward")
  on_device: bool = option(
    False, "run a step, with a reward on token ids, as a single XLA program"
  )
  aggregation: str = option(
    "sum_then_normalize",
    "several rewards: sum_then_normalize = weighted sum; normalize_then_sum = "
    "weighted sum of rewards normalised in each group (GDPO)",
    AGGREGATIONS,
  )
  length_penalty: float = not_negative(
    0.0,
    "penalty on lengths (ALP): this x tokens / max_new_tokens x share of the "
    "group that is correct; 0 = off",
  )


@frozen_options
class EnvironmentSettings:
  """Environment or tools that answer between turns of the model."""

  path: str = option(
    "",
    'environment: built-in name, "gymnasium:ID", "file.py", "file.py:NAME" or '
    '"package.module:NAME"; "" = none, or only environment.tools',
  )
  tools: tuple[Any, ...] = option(
    (), 'functions for the model to call, each "file.py:function"'
  )
  tool_format: str = option("hermes", "syntax of tool calls", TOOL_CALLS)
  options: Mapping[str, Any] = free_field("arguments of the environment")
  action: str = option(
    "auto",
    "action for an environment class: text = the turn's text; number = its "
    "last number; json = its last JSON value; auto = by action_space, or text",
    ACTIONS,
  )
  max_turns: int = one_or_more(8, "maximum turns per trajectory")
  max_observation: int = not_negative(
    0, "maximum tokens per observation; 0 = the upper limit, max_new_tokens / 2"
  )
  max_turn_tokens: int = not_negative(
    0, "maximum tokens per turn, then the environment answers; 0 = no limit"
  )
  failed: str = option(
    "drop",
    "if the environment fails: drop = omit the trajectory; zero = reward 0",
    ("drop", "zero"),
  )
  template: str = option(
    "\n{observation}\n", "template of observations in plain-text prompts"
  )
  credit: str = option(
    "trajectory",
    "advantage of a turn: trajectory = the trajectory's; turn = rewards "
    "from this turn on, minus their mean over the other samples; turn_reached "
    "= the same, but the mean is over samples that reached this turn. Only "
    "loss.weighting = fixed_length or sequence_sum keep all of them unbiased",
    CREDITS,
  )
  workers: int = option(
    0,
    "environment processes per machine; 0 = in the main process",
    within="[0, 1024]",
  )
  timeout: float = positive(30.0, "time limit per environment call, in seconds")
  check: str = option(
    "actions",
    "test turns at the start, to check that the environment is reproducible: "
    "actions = turns without tool calls; tools = also a call of each tool",
    ("actions", "tools"),
  )

  @property
  def on(self) -> bool:
    """True if there is an environment or a tool."""
    return bool(self.path or self.tools)

  @property
  def failed_reward(self) -> float:
    """Reward of a trajectory whose environment failed; NaN drops it."""
    return 0.0 if self.failed == "zero" else math.nan


@frozen_options
class FilterGroupsSettings:
  """Dynamic sampling (DAPO): new prompts for groups of equal rewards."""

  enable: bool = option(False, "replace groups of equal rewards by new groups")
  # With several rewards `acc` also drops groups that have a gradient.
  metric: str = option(
    "reward",
    "reward that must vary in a group: reward = total; acc = first function",
    ("reward", "acc"),
  )
  max_num_gen_batches: int = one_or_more(10, "maximum batches drawn per step")
  gen_parts: int = one_or_more(1, "later draws: batch_size / gen_parts prompts")
  rescale: bool = option(
    False, "scale gradients by group_acceptance, the share of groups that vary"
  )
