"""From a config to functions: where the names in a config get their meaning.

The programs share this; nothing below them reads a config.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from grpojax.core import advantages, losses
from grpojax.core import group_size as group_size_lib
from grpojax.core import kl as kl_lib
from grpojax.core.rollout import rollout
from grpojax.core.sampling import Sampling
from grpojax.core.step import init_state
from grpojax.core.types import LM, Params, Prompts, Rollout, TrainState
from grpojax.data import arithmetic, gsm8k, pipeline
from grpojax.models import hf
from grpojax.rewards import exact
from grpojax.runtime import config as config_lib
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.runtime import validation

DATASETS = {"arithmetic": arithmetic, "gsm8k": gsm8k}


class Policy(NamedTuple):
  """A model with its tokenizer.

  Attributes:
    lm: the model's functions.
    params: its parameters.
    tokenizer: a transformers tokenizer.
    eos_ids: ids that end a completion.
    pad_id: id to pad with.
  """

  lm: LM
  params: Params
  tokenizer: Any
  eos_ids: tuple[int, ...]
  pad_id: int


def load_policy(path: str, dtype: str = "float32", remat: bool = False):
  """Reads a model directory, or an embedded model by its name.

  Raises:
    ValueError: the directory, its weights or its tokenizer do not fit.
  """
  directory = hf.resolve(path)
  tokenizer = tokenizer_lib.load(directory)
  size = hf.to_transformer_config(hf.read_config(directory)).vocab_size
  if max(tokenizer.get_vocab().values()) >= size:
    raise ValueError(
      f"the tokenizer in {directory} has ids of {size} and more, but the model "
      f"has only {size} embeddings: they are not of the same model"
    )
  lm, params = hf.load(directory, dtype=jnp.dtype(dtype), remat=remat)
  eos_ids = tokenizer_lib.eos_ids(directory, tokenizer)
  return Policy(lm, params, tokenizer, eos_ids, tokenizer_lib.pad_id(tokenizer))


def _load_examples(config: ConfigDict, split: str, **options):
  try:
    load = DATASETS[config.data.name].load
    return load(split, **options, **config.data.options)
  except TypeError as error:  # an option that this dataset does not have
    raise ValueError(f"data.options: {error}") from error


def training_examples(config: ConfigDict):
  """The training split, seeded by the run's seed."""
  return _load_examples(config, "train", seed=config.seed)


def held_out_examples(config: ConfigDict):
  """The first `eval.num_prompts` held-out problems, whatever the run's seed."""
  return _load_examples(config, "test", size=config.eval.num_prompts)


def prompt_batches(
  config: ConfigDict, policy: Policy, examples, **options
) -> Iterator[tuple[Prompts, list[dict[str, Any]]]]:
  """Batches of prompts in the policy's format, see `pipeline`."""
  encode = functools.partial(
    tokenizer_lib.encode_prompt, policy.tokenizer, template=config.data.template
  )
  return pipeline.prompt_batches(
    examples,
    encode,
    max_prompt_length=config.data.max_prompt_length,
    pad_id=policy.pad_id,
    **options,
  )


def group_sizes(config: ConfigDict) -> list[int]:
  """All the group sizes that the run may use."""
  return validation.group_sizes(config_lib.flatten(config))


def samples_per_step(config: ConfigDict) -> int:
  """N = B G, the same at every step."""
  auto = config.group_size == validation.AUTO
  first = config.auto_group_size.start if auto else config.group_size
  return config.batch_size * first


def training_batches(
  config: ConfigDict, policy: Policy, group_size: int, start: int = 0
) -> Iterator[tuple[Prompts, list[dict[str, Any]]]]:
  """The run's prompts from number `start` on, with targets for its reward."""
  target = None
  if config.reward.on_device:
    target, _ = device_reward(config, policy)
  return prompt_batches(
    config,
    policy,
    training_examples(config),
    batch_size=samples_per_step(config) // group_size,
    target=target,
    seed=config.seed,
    start=start,
  )


def sampling(config: ConfigDict) -> Sampling:
  """The sampling distribution of training."""
  s = config.sampling
  return Sampling(s.temperature, s.top_k, s.top_p, s.min_p)


def host_reward(config: ConfigDict) -> Callable[..., float]:
  """`(prompt, completion, example) -> float`."""
  return getattr(exact, config.reward.name)


def device_reward(config: ConfigDict, policy: Policy):
  """`(target, reward)`: the same reward on ids, see `rewards.exact`."""
  make = getattr(exact, f"{config.reward.name}_ids")
  return make(policy.tokenizer, policy.eos_ids)


def advantage(config: ConfigDict) -> Callable[..., jax.Array]:
  """Rewards [..., G] -> advantages [..., G]; see `make_batch` for lengths."""
  function, k = getattr(advantages, config.advantage), config.subset_size
  if config.advantage in ("max_at_k", "min_at_k"):
    return functools.partial(function, k=k)
  return function


def optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """AdamW under the config's schedule."""
  optim, steps = config.optim, config.steps
  updates = steps * optim.epochs * optim.minibatches
  decay = max(updates - optim.warmup_steps, 1)
  peak = optim.learning_rate
  shapes = {
    "constant": optax.constant_schedule(peak),
    "linear": optax.linear_schedule(peak, 0.0, decay),
    "cosine": optax.cosine_decay_schedule(peak, decay),
  }
  schedule = shapes[optim.schedule]
  if optim.warmup_steps:  # from the first update on: none of them is at 0
    first = peak / (optim.warmup_steps + 1)
    warmup = optax.linear_schedule(first, peak, optim.warmup_steps)
    schedule = optax.join_schedules([warmup, schedule], [optim.warmup_steps])
  return optax.adamw(
    schedule, b1=optim.b1, b2=optim.b2, weight_decay=optim.weight_decay
  )


def first_state(
  config: ConfigDict, tx: optax.GradientTransformation, params: Params
) -> TrainState:
  """The state before the first step of a run."""
  state = init_state(params, tx, jax.random.key(config.seed))
  if config.group_size != validation.AUTO:
    return state
  start = config.auto_group_size.start
  return state.replace(group_size=group_size_lib.init_choice(start))


def adapt(config: ConfigDict):
  """What follows from a diagnosis: `group_size.observe`, with its settings."""
  auto = config.auto_group_size
  return functools.partial(
    group_size_lib.observe,
    smallest=auto.smallest,
    largest=auto.largest,
    decay=auto.decay,
    margin=auto.margin,
    confidence=auto.confidence,
  )


def needs_reference(config: ConfigDict) -> bool:
  """Whether a reference policy is held in memory."""
  return config.loss.beta > 0


def kl_in_reward(config: ConfigDict) -> float:
  """beta, where the KL penalty is part of the reward; else 0."""
  return config.loss.beta if config.loss.kl_placement == "reward" else 0.0


def update_options(config: ConfigDict) -> dict[str, Any]:
  """Keyword arguments of `make_update` that say what is optimized and how."""
  loss, optim = config.loss, config.optim
  weighting = getattr(losses, loss.weighting)
  if loss.weighting == "fixed_length":
    weighting = functools.partial(
      weighting, length=config.sampling.max_new_tokens
    )
  in_loss = loss.beta > 0 and loss.kl_placement != "reward"
  return {
    "loss": functools.partial(
      losses.grpo_loss,
      ratio=getattr(losses, loss.ratio),
      clip_low=loss.clip_low,
      clip_high=loss.clip_high,
      dual_clip=loss.dual_clip or None,
      kl=getattr(kl_lib, loss.kl),
      beta=loss.beta if in_loss else 0.0,
      kl_correction=loss.kl_placement == "ratio",
    ),
    "weighting": weighting,
    "epochs": optim.epochs,
    "minibatches": optim.minibatches,
    "micro_batches": optim.micro_batches,
    "max_grad_norm": optim.max_grad_norm,
    "sampling": sampling(config),
    "chunk_size": config.logits_chunk,
  }


def make_sampler(config: ConfigDict, policy: Policy, group_size: int, sampling):
  """`(params, prompts, key) -> Rollout`, jitted."""
  return jax.jit(
    functools.partial(
      rollout,
      policy.lm,
      group_size=group_size,
      max_new_tokens=config.sampling.max_new_tokens,
      eos_ids=policy.eos_ids,
      pad_id=policy.pad_id,
      sampling=sampling,
    )
  )


def decode(policy: Policy, samples: Rollout) -> list[list[str]]:
  """Texts of all completions, [B][G], without their EOS."""
  ids, mask = jax.device_get((samples.completion_ids, samples.completion_mask))
  text = functools.partial(tokenizer_lib.decode_completion, policy.tokenizer)
  return [
    [text(i, m, policy.eos_ids) for i, m in zip(*group, strict=True)]
    for group in zip(ids, mask, strict=True)
  ]


def score(
  reward: Callable[..., float],
  examples: list[dict[str, Any]],
  texts: list[list[str]],
) -> np.ndarray:
  """Rewards [B, G], float32, of decoded completions."""
  return np.array(
    [
      [reward(example["prompt_text"], text, example) for text in group]
      for example, group in zip(examples, texts, strict=True)
    ],
    np.float32,
  )
