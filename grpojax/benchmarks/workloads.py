"""GRPO steps to time in any library: sizes, prompts, reward.

In the comparison all libraries (grpojax, TRL, Tunix) use the same decoder,
prompts, completion lengths, reward and optimizer.
"""

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from grpojax.training.config import default_config

MODEL = {
  "model_type": "qwen2",
  "vocab_size": 4096,
  "hidden_size": 256,
  "intermediate_size": 704,
  "num_hidden_layers": 6,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "hidden_act": "silu",
  "max_position_embeddings": 1024,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
  "pad_token_id": 0,
  "eos_token_id": 1,
}
"""The config.json of the decoder, which has random weights."""

SMOLLM2 = MODEL | {
  "model_type": "llama",
  "vocab_size": 49152,
  "hidden_size": 576,
  "intermediate_size": 1536,
  "num_hidden_layers": 30,
  "num_attention_heads": 9,
  "num_key_value_heads": 3,
  "max_position_embeddings": 8192,
  "rms_norm_eps": 1e-5,
  "rope_theta": 100000.0,
}
"""The sizes of SmolLM2-135M (Allal et al. 2025, arXiv 2502.02737)."""


class Workload(NamedTuple):
  """Sizes of a step."""

  prompts: int  # number of prompts, B
  group_size: int  # completions per prompt, G
  prompt_length: int  # of every prompt, P, in tokens
  new_tokens: int  # of the longest completion, T
  mean_length: int = 0  # of the lengths in `stop_table`; 0 if all have T tokens
  model: Mapping[str, Any] = MODEL  # config.json of the decoder
  settings: Mapping[str, Any] = {}  # other settings of the run


_SMOLLM2 = {
  "loss.beta": 0.0,
  "model.remat": "attention",
  "logits_chunk": 1024,  # a micro-batch: the backward pass recomputes no logits
}


def _turns(turns: int, tokens: int, observed: int) -> dict[str, Any]:
  return {
    "environment.path": f"{__name__}:ENVIRONMENT",
    "environment.options": {"tokens": observed},
    "environment.max_turns": turns,
    "environment.max_turn_tokens": tokens,
    "environment.max_observation": observed,
    "environment.template": "{observation}",
  }


WORKLOADS = {
  "fixed": Workload(4, 8, 64, 128),
  "tail": Workload(4, 8, 64, 256, mean_length=64),
  "long_prompt": Workload(4, 16, 512, 64),
  "turns": Workload(4, 8, 64, 112, settings=_turns(4, 16, 16)),
  "turns_long": Workload(4, 8, 256, 512, settings=_turns(6, 32, 64)),
  "smollm2": Workload(8, 8, 64, 48, 0, SMOLLM2, _SMOLLM2),
  "smollm2_lora": Workload(
    8, 8, 64, 48, 0, SMOLLM2, _SMOLLM2 | {"lora.rank": 16}
  ),
}
_TABLE_STEPS = 32


def prompt_ids(workload: Workload, steps: int) -> Int[np.ndarray, "S B P"]:
  """Draws the prompts of all steps, uniform over ids except padding and EOS."""
  shape = steps, workload.prompts, workload.prompt_length
  vocab_size = workload.model["vocab_size"]
  ids = np.random.default_rng(0).integers(2, vocab_size, shape)
  return ids.astype(np.int32)


def stop_table(workload: Workload) -> Int[np.ndarray, "S B G"]:
  """Draws the lengths of completions: geometric, at most T."""
  samples = workload.prompts * workload.group_size
  lengths = np.random.default_rng(0).geometric(
    1 / workload.mean_length, (_TABLE_STEPS, samples)
  )
  lengths = np.minimum(lengths, workload.new_tokens).astype(np.int32)
  return lengths.reshape(-1, workload.prompts, workload.group_size)


def lengths(workload: Workload, step: int) -> Int[np.ndarray, "B G"]:
  """Returns the lengths of a step's completions, in tokens."""
  if workload.mean_length:
    return stop_table(workload)[step % _TABLE_STEPS]
  shape = workload.prompts, workload.group_size
  return np.full(shape, workload.new_tokens, np.int32)


def word(token: int) -> str:
  """Returns the text of a token; half of the vocabulary starts with "a"."""
  return ("<pad>", "<eos>")[token] if token < 2 else f"{'ab'[token % 2]}{token}"


def count_a(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """Rewards a completion by its number of tokens that start with "a"."""
  del prompt, example
  return float(completion.count("a"))


REWARD = f"{__name__}:{count_a.__name__}"


def _observe(state: int | None, *, tokens: int) -> dict[str, Any]:
  """Returns an observation of `tokens` words, different ones in each turn."""
  state = state or 2
  words = " ".join(word(state + i) for i in range(tokens))
  return {"observation": words, "state": state + tokens}


ENVIRONMENT = types.SimpleNamespace(step=_observe)
"""The environment of workloads with several turns; it never ends a sample."""


def config_of(name: str) -> ConfigDict:
  """Returns the training config of a workload, except model.path."""
  config = default_config()
  workload = WORKLOADS[name]
  config.name = name
  config.batch_size = workload.prompts
  config.group_size = workload.group_size
  config.data.max_prompt_length = workload.prompt_length
  config.sampling.max_new_tokens = workload.new_tokens
  config.reward.functions = (REWARD,)
  config.advantage = "grpo"
  config.loss.weighting = "sequence_mean"
  config.loss.beta = 0.04  # defaults: k3 in the loss, and clipping at 0.2
  config.optim.learning_rate = 1e-6
  config.optim.b2 = 0.999
  config.update_from_flattened_dict(workload.settings)
  return config
