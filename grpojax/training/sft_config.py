"""The configuration of supervised fine-tuning: defaults and validation."""

import math

from ml_collections import ConfigDict

from grpojax.runtime import config as config_lib
from grpojax.runtime.special_tokens import SPECIAL_TOKENS

FORMATS = ("document", "dialogue")
TOKENIZERS = ("characters", "bpe")


def default_config() -> ConfigDict:
  """Plain-text pretraining of the tiny arithmetic model, from scratch."""
  config = ConfigDict()
  config.name = "arithmetic-base"
  config.seed = 0
  config.steps = 1100
  # "document": plain text, for a base model; "dialogue": with a chat template,
  # for an instruct model.
  config.format = "document"
  config.rows = 20  # rows a step
  config.row_length = 272  # tokens a row; longer examples are left out
  config.log_every = 100
  # Arithmetic only.
  config.hasty = 0.6  # share of texts whose author writes no steps
  # How often a carry is forgotten: where the digits make 10, and 19.
  config.forget_low = 0.0
  config.forget_high = 0.0
  config.difficulty_low = 2
  config.difficulty_high = 4
  config.data = ConfigDict()
  config.data.name = "arithmetic"
  # Of another data set.
  config.data.path = ""
  config.data.options = ConfigDict()  # other keyword arguments of its load
  config.data.template = "{prompt}\n"  # of prompts, as in training by GRPO
  config.data.special_tokens = "text"  # in prompts and solutions, likewise
  config.data.learn_prompts = False  # whether the loss counts the prompts too
  config.tokenizer = "characters"  # or "bpe"; of a model from scratch
  config.vocab_size = 1024  # tokens of a "bpe"
  config.model = ConfigDict()
  config.model.path = ""  # start from this directory; "" is from scratch
  config.model.width = 128
  config.model.layers = 4
  config.model.heads = 4
  config.model.kv_heads = 2
  config.model.mlp = 448
  config.optim = ConfigDict()
  config.optim.learning_rate = 2e-3  # of embeddings and norms (AdamW)
  config.optim.muon_learning_rate = 2e-2  # of the layers' matrices (Muon)
  config.optim.warmup_steps = 50
  config.optim.weight_decay = 0.01
  config.optim.max_grad_norm = 1.0
  return config.lock()


def problems(config: ConfigDict) -> list[str]:
  """What is wrong with the values of a config, a line each."""
  wrong = []
  for name in ("width", "layers", "heads", "kv_heads", "mlp"):
    if config.model[name] < 1:
      wrong.append(f"model.{name} = {config.model[name]}: must be 1 or more")
  for name, value, known in (
    ("format", config.format, FORMATS),
    ("tokenizer", config.tokenizer, TOKENIZERS),
    ("data.special_tokens", config.data.special_tokens, SPECIAL_TOKENS),
  ):
    if value not in known:
      wrong.append(f"{name} = {value!r}: use one of {', '.join(known)}")
  for name in ("steps", "rows", "row_length", "difficulty_low", "log_every"):
    if config[name] < 1:
      wrong.append(f"{name} = {config[name]}: must be 1 or more")
  if config.difficulty_high < config.difficulty_low:
    wrong.append("difficulty_high: must not be below difficulty_low")
  if not 0 <= config.hasty <= 1:
    wrong.append(f"hasty = {config.hasty}: is a probability")
  if not 0 <= config.forget_low <= config.forget_high <= 1:
    low, high = config.forget_low, config.forget_high
    wrong.append(
      f"forget_low, forget_high = {low}, {high}: are probabilities, the first "
      "not above the second"
    )
  if config.data.name == "arithmetic" and config.tokenizer != "characters":
    wrong.append("tokenizer: arithmetic is written in characters")
  for name in ("learning_rate", "muon_learning_rate", "max_grad_norm"):
    if not 0 < config.optim[name] < math.inf:
      wrong.append(f"optim.{name} = {config.optim[name]}: must be more than 0")
  if not 0 <= config.optim.weight_decay < math.inf:
    value = config.optim.weight_decay
    wrong.append(f"optim.weight_decay = {value}: must be 0 or more")
  if not 0 <= config.seed < 2**32:
    wrong.append(f"seed = {config.seed}: must be in 0..2**32 - 1")
  wrong += config_lib.name_problems(config.name)
  if not 0 <= config.optim.warmup_steps < config.steps:
    wrong.append("optim.warmup_steps: must be 0 or more, and below steps")
  return wrong


def validate(config: ConfigDict) -> None:
  """Raises ValueError with all that is wrong with `config`, a line each."""
  wrong_keys = config_lib.check_keys(config, default_config())
  config_lib.refuse(wrong_keys or problems(config))
