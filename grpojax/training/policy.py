"""A model as the programs hold it: functions, weights and tokenizer.

Training changes `params`: all weights or, with LoRA, adapters of `frozen`
weights. These are an argument of every compiled program, never a constant in
it, and exist once: the reference is the model without adapters, `params = {}`.
"""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from grpojax.core.ends import Ends, StopTable
from grpojax.core.types import LM, Params, Rollout
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.files import hub
from grpojax.runtime.text import stop_strings
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.training.run import run_directory, run_storage


class Policy(NamedTuple):
  """A model with its tokenizer."""

  directory: pathlib.Path  # that it was read from
  lm: LM  # functions of the whole model's parameters
  tokenizer: Any  # a transformers tokenizer
  eos_ids: tuple[int, ...]  # ids that end a completion
  pad_id: int  # id to pad with
  params: Params | None = None  # trained parameters; None before `with_weights`
  frozen: Params | None = None  # base model's parameters, if there are adapters
  lora_scale: float = 0.0  # scale of the adapters
  shape: TransformerConfig | None = None  # sizes and options of the model
  vmappable: bool = True  # True if `jax.vmap` accepts the model's functions
  teacher: "Policy | None" = None  # reference that is another model
  name: hub.Name | None = None  # on the Hub, with its commit
  ignore_keys: tuple[str, ...] = ()  # of `hf.read_config`
  stop: StopTable | None = None  # strings that end a completion

  @property
  def ends(self) -> Ends:
    """Ids and strings that end a completion, or a turn."""
    return Ends(self.eos_ids, self.stop)


def find_model(
  path: str | pathlib.Path, files: Sequence[str] = hub.WHOLE
) -> pathlib.Path:
  """Returns a model's directory; ValueError if there is none.

  `path` is a directory of a model or of a finished run, a .gguf file, an
  embedded model's name, or, if no such path exists, ORG/NAME or
  ORG/NAME@REVISION of the Hugging Face Hub, to download these `files` from.
  """
  name = hub.parse(path)
  on_hub = name is not None and not hf.exists(path)
  copy = hub.fetch(name, files) if on_hub else run_storage.local(path)
  with run_storage.naming(copy, str(name if on_hub else path)):
    return hf.resolve(copy if on_hub else run_directory.model_directory(copy))


def pinned(path: str) -> str:
  """Returns a name of the Hub with its present commit; a path as it is."""
  name = None if hf.exists(path) else hub.parse(path)
  return f"{name.id}@{hub.commit(name)}" if name else path


def open_policy(
  path: str,
  dtype: str = "float32",
  remat: str = "none",
  attention: str = "auto",
  ignore_keys: Sequence[str] = (),
) -> Policy:
  """Reads all of a model but its weights.

  `path` is as for `find_model`, `dtype` the format of computation, `remat` and
  `attention` are as for `transformer`, and `ignore_keys` for `hf.read_config`.
  ValueError if the configuration or the tokenizer does not fit.
  """
  path = pinned(path)
  directory = find_model(path, hub.TEXTS)
  tokenizer = tokenizer_lib.load(directory)
  config = hf.to_transformer_config(hf.read_config(directory, ignore_keys))
  if config.labels:
    raise ValueError(
      f"the model in {directory} is a sequence classifier: it can be a "
      "reward.model, but writes no text"
    )
  eos_ids = tokenizer_lib.eos_ids(directory, tokenizer, config.vocab_size)
  gaps = tokenizer_lib.gaps(tokenizer, config.vocab_size, eos_ids)
  return Policy(
    directory,
    transformer(
      dataclasses.replace(config, gaps=gaps),
      dtype=jnp.dtype(dtype),
      remat=remat,
      attention=attention,
    ),
    tokenizer,
    eos_ids,
    tokenizer_lib.pad_id(tokenizer),
    shape=config,
    vmappable=not config.experts,
    name=None if hf.exists(path) else hub.parse(path),
    ignore_keys=tuple(ignore_keys),
  )


def with_stop(policy: Policy, strings: Sequence[str]) -> Policy:
  """Makes these strings end completions; ValueError if that is impossible."""
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
  directory: pathlib.Path,
  prompt_tokens: int,
  new_tokens: int,
  ignore_keys: Sequence[str] = (),
) -> None:
  """Raises ValueError if texts may exceed a model's positions.

  It only prints a warning if RoPE is scaled, because `max_position_embeddings`
  may be the length before scaling.
  """
  hf_config = hf.read_config(directory, ignore_keys)
  limit = hf_config.get("max_position_embeddings") or math.inf
  if prompt_tokens + new_tokens <= limit:
    return
  trouble = (
    f"a prompt of {prompt_tokens} tokens (data.max_prompt_length) and a "
    f"completion of {new_tokens} (sampling.max_new_tokens) exceed the {limit} "
    f"positions of {directory} (max_position_embeddings in its config.json)"
  )
  if hf.to_transformer_config(hf_config).rope.factor == 1:
    raise ValueError(f"{trouble}: lower one of the two settings")
  print(f"warning: {trouble}")


def with_weights(
  policy: Policy,
  dtype: str = "float32",
  shardings: Callable[[Any], Any] | None = None,
) -> Policy:
  """Reads the weights, as parameters of this format to train.

  `shardings` maps abstract parameters to shardings; None is one device.
  ValueError if the weights do not fit, or cannot be downloaded.
  """
  directory = policy.directory
  if policy.name:
    directory = hub.fetch(policy.name, hub.WHOLE)
  keys = policy.ignore_keys
  params = hf.load_params(directory, jnp.dtype(dtype), shardings, keys)
  return policy._replace(params=params)


def load_policy(path: str, dtype: str = "float32") -> Policy:
  """Reads a whole model by `open_policy`, with parameters in float32."""
  return with_weights(open_policy(path, dtype))


def with_adapters(
  policy: Policy, key: Key[Array, ""], *, rank: int, alpha: float, targets: str
) -> Policy:
  """Freezes the weights and adds fresh adapters to train instead (LoRA).

  They are scaled by alpha / rank, and change nothing at first. `targets` is a
  pattern of the paths of the adapted matrices; ValueError if it matches none,
  or something else.
  """
  adapters = lora.init(policy.params, key, rank, targets)
  return policy._replace(
    params=adapters, frozen=policy.params, lora_scale=alpha / rank
  )


def jit(
  policy: Policy, function: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
  """Compiles a pure `function(lm, *args)` to `(*args) -> function(lm, *args)`.

  `lm` takes the trained parameters; frozen weights are passed at every call.
  For the options of `jax.jit` argument 0 is the model.
  """

  def call(frozen, *args, **kwargs):
    lm = policy.lm
    if frozen is not None:
      lm = lora.adapt(lm, frozen, policy.lora_scale)
    return function(lm, *args, **kwargs)

  # For logs and profiles; a partial function has no name of its own.
  call.__name__ = getattr(function, "func", function).__name__
  return functools.partial(jax.jit(call, **options), policy.frozen)


def lower(
  program: Callable[..., Any], *args: Any, **kwargs: Any
) -> jax.stages.Lowered:
  """Lowers a program of `jit`; the arguments may be shapes."""
  return program.func.lower(*program.args, *args, **kwargs)


def wait(arrays: PyTree, check_signals: Callable[[], None]) -> None:
  """Waits for the devices, calling `check_signals` about 20 times a second.

  It is called at least once, and may raise.
  """
  began = time.monotonic()
  for array in jax.tree.leaves(arrays):
    check_signals()
    while not array.is_ready():
      # A small part of the time so far, so that short waits end promptly.
      time.sleep(min(0.05, 1e-4 + (time.monotonic() - began) / 100))
      check_signals()


def whole_params(policy: Policy, params: Params) -> Params:
  """Returns the whole model for `hf.save`, adapters merged in float32."""
  if policy.frozen is None:
    return params
  return lora.merge_lazily(policy.frozen, params, policy.lora_scale)


def decode(
  policy: Policy, samples: Rollout, rows: slice = slice(None)
) -> list[list[str]]:
  """Returns the completions of some prompts, [rows][G], without their ends.

  Of a trajectory it is the last turn, so that no environment's text is taken
  for an answer.
  """
  ids, mask, turns = jax.device_get(
    (samples.completion_ids, samples.completion_mask, samples.turns)
  )
  if turns is not None:
    mask = mask & (turns == np.max(turns, axis=-1, keepdims=True))
  text = functools.partial(tokenizer_lib.decode_completion, policy.tokenizer)
  return [
    [text(i, m, policy.ends) for i, m in zip(*group, strict=True)]
    for group in zip(ids[rows], mask[rows], strict=True)
  ]
