"""Policies: a model's functions, weights and tokenizer.

Training changes `params`: all weights or, with LoRA, adapters of `frozen`
weights. Frozen weights are an argument of every compiled program, never a
constant. With LoRA the reference is the model without adapters, `params = {}`.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from grpojax.core.ends import Ends, StopTable
from grpojax.core.objective import Objective
from grpojax.core.types import LM, Params, Rollout
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.text import stop_strings, tokenization
from grpojax.training.files.sources import ModelFiles, find_files


class Policy(NamedTuple):
  """A model with its tokenizer."""

  files: ModelFiles | None  # its source
  lm: LM  # functions that take the whole model's parameters
  tokenizer: Any  # a transformers tokenizer
  eos_ids: tuple[int, ...]  # ids that end a completion
  pad_id: int  # token id of padding
  params: Params | None = None  # trained parameters; None before `with_weights`
  frozen: Params | None = None  # base model's parameters under adapters
  lora_scale: float = 0.0  # scale of the adapters
  shape: TransformerConfig | None = None  # sizes and options of the model
  vmappable: bool = True  # True if `jax.vmap` accepts the model's functions
  teacher: "Policy | None" = None  # reference if it is a different model
  stop: StopTable | None = None  # stop strings

  @property
  def ends(self) -> Ends:
    """EOS ids and stop strings, which end completions and turns."""
    return Ends(self.eos_ids, self.stop)


def open_policy(
  files: ModelFiles,
  dtype: str = "float32",
  remat: str = "none",
  attention: str = "auto",
) -> Policy:
  """Opens a model without its weights.

  See `transformer` for `remat` and `attention`; the model computes in `dtype`.
  ValueError for an unsupported config or tokenizer.
  """
  directory = files.directory
  tokenizer = files.tokenizer
  config = hf.to_transformer_config(files.config)
  if config.labels:
    raise ValueError(
      f"the model in {directory} is a sequence classifier, which generates no "
      "text: use it as reward.model"
    )
  eos_ids = tokenization.eos_ids(directory, tokenizer, config.vocab_size)
  gaps = tokenization.gaps(tokenizer, config.vocab_size, eos_ids)
  options = {"dtype": jnp.dtype(dtype), "remat": remat, "attention": attention}
  return Policy(
    files,
    transformer(dataclasses.replace(config, gaps=gaps), **options),
    tokenizer,
    eos_ids,
    tokenization.pad_id(tokenizer),
    shape=config,
    vmappable=not config.experts,
  )


def with_stop(policy: Policy, strings: Sequence[str]) -> Policy:
  """Sets the stop strings; ValueError for unusable ones."""
  if not strings:
    return policy._replace(stop=None)
  if policy.stop and policy.stop.strings == tuple(strings):
    return policy
  count = policy.shape.vocab_size
  try:
    stop = stop_strings.build(policy.tokenizer, strings, count)
  except ValueError as error:
    text = config_error("sampling.stop", strings, str(error))
    raise ValueError(text) from None
  return policy._replace(stop=stop)


def check_positions(
  files: ModelFiles, prompt_tokens: int, new_tokens: int
) -> None:
  """Raises ValueError if texts may exceed a model's maximum position.

  With scaled RoPE it only warns: the config may have the limit before scaling.
  """
  rope = hf.to_transformer_config(files.config).rope
  limit = files.config.get("max_position_embeddings") or math.inf
  key = "max_position_embeddings"
  if rope.longest < limit:
    limit = rope.longest
    key = "original_max_position_embeddings: longer texts need long_factor"
  if prompt_tokens + new_tokens <= limit:
    return
  message = (
    f"a prompt of {prompt_tokens} tokens (data.max_prompt_length) and a "
    f"completion of {new_tokens} (sampling.max_new_tokens) exceed the {limit} "
    f"positions of {files.directory} ({key} in its config.json)"
  )
  if rope.factor == 1:
    raise ValueError(f"{message}: lower one of these two settings")
  print(f"warning: {message}")


def with_weights(
  policy: Policy,
  dtype: str = "float32",
  shardings: Callable[[Any], Any] | None = None,
) -> Policy:
  """Loads the weights as trainable parameters.

  `shardings` maps abstract parameters to shardings; None uses one device.
  ValueError if the weights do not match the model or the download fails.
  """
  directory = policy.files.with_weights()
  keys = policy.files.ignore_keys
  params = hf.load_params(directory, jnp.dtype(dtype), shardings, keys)
  return policy._replace(params=params)


def load_policy(path: str, dtype: str = "float32") -> Policy:
  """Loads a model with float32 parameters, to compute in `dtype`."""
  return with_weights(open_policy(find_files(path), dtype))


def with_adapters(
  policy: Policy, key: Key[Array, ""], *, rank: int, alpha: float, targets: str
) -> Policy:
  """Freezes the weights and adds LoRA adapters, which start at zero.

  Adapters are scaled by alpha / rank. `targets` is a regular expression for
  the paths of adapted matrices; ValueError if it matches no matrix, or another
  kind of parameter.
  """
  adapters = lora.init(policy.params, key, rank, targets)
  return policy._replace(
    params=adapters, frozen=policy.params, lora_scale=alpha / rank
  )


def jit(
  policy: Policy, function: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
  """Compiles a pure `function(lm, *args)`; the result is called with `args`.

  `lm` takes the trained parameters; each call also passes the frozen ones.
  `options` are for `jax.jit`; argument 0 is the model, so `args` count from 1.
  """

  def call(frozen, *args, **kwargs):
    lm = policy.lm
    if frozen is not None:
      lm = lora.adapt(lm, frozen, policy.lora_scale)
    return function(lm, *args, **kwargs)

  # Logs and profiles show the name, which a partial function lacks.
  call.__name__ = getattr(function, "func", function).__name__
  return functools.partial(jax.jit(call, **options), policy.frozen)


def sampled_by(policy: Policy, objective: Objective) -> Policy:
  """Returns the policy for rollouts, which records experts to be replayed."""
  if not objective.router_replay:
    return policy
  return policy._replace(lm=policy.lm.recording())


def lower(
  program: Callable[..., Any], *args: Any, **kwargs: Any
) -> jax.stages.Lowered:
  """Lowers a program of `jit` for arguments, which may be shapes."""
  return program.func.lower(*program.args, *args, **kwargs)


def wait(arrays: PyTree, check_signals: Callable[[], None]) -> None:
  """Waits for arrays; calls `check_signals` at least 20 times a second."""
  began = time.monotonic()
  for array in jax.tree.leaves(arrays):
    check_signals()
    while not array.is_ready():
      # Sleep 1% of the time so far, so that short waits end promptly.
      time.sleep(min(0.05, 1e-4 + (time.monotonic() - began) / 100))
      check_signals()


def whole_params(policy: Policy, params: Params) -> Params:
  """Returns the full model for `hf.save`, with adapters merged in float32."""
  if policy.frozen is None:
    return params
  return lora.merge_lazily(policy.frozen, params, policy.lora_scale)


def decode(
  policy: Policy, samples: Rollout, rows: slice = slice(None)
) -> list[list[str]]:
  """Decodes the completions of `rows`, [rows][G], without EOS or stop string.

  Decodes only the last turn of a trajectory, so that an environment's text is
  never taken for an answer.
  """
  ids, mask, turns = jax.device_get(
    (samples.completion_ids, samples.completion_mask, samples.turns)
  )
  if turns is not None:
    mask = mask & (turns == np.max(turns, axis=-1, keepdims=True))
  text = functools.partial(tokenization.decode_completion, policy.tokenizer)
  return [
    [text(i, m, policy.ends) for i, m in zip(*group, strict=True)]
    for group in zip(ids[rows], mask[rows], strict=True)
  ]
