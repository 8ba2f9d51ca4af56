"""The settings of supervised fine-tuning, and what makes them valid."""

from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.cli.settings import free_section, section, setting
from grpojax.runtime.text.special_tokens import SPECIAL_TOKENS

FORMATS = ("document", "dialogue")
TOKENIZERS = ("characters", "bpe")
_ONE, _POSITIVE = "[1, inf)", "(0, inf)"

_DATA = section(
  "the texts",
  name=setting("arithmetic", "the data set; arithmetic is drawn anew"),
  path=setting(
    "",
    "of data in files: a file, a directory, or a pattern of files; of "
    "huggingface: ORG/NAME of the Hub",
  ),
  options=free_section("other keyword arguments of the data set's load"),
  template=setting(
    "{prompt}\n", "what a plain prompt becomes, as in training by GRPO"
  ),
  special_tokens=setting(
    "text",
    "what names of special tokens in prompts and solutions are: text, or the "
    "control token of that name",
    SPECIAL_TOKENS,
  ),
  learn_prompts=setting(False, "the loss counts the prompts too"),
)

_MODEL = section(
  "the model",
  path=setting(
    "",
    "directory, .gguf file, embedded model, or ORG/NAME[@REVISION], to start "
    'from; "" = from scratch',
  ),
  width=setting(128, "from scratch: width", within=_ONE),
  layers=setting(4, "from scratch: layers", within=_ONE),
  heads=setting(4, "from scratch: heads of queries", within=_ONE),
  kv_heads=setting(2, "from scratch: heads of keys and values", within=_ONE),
  mlp=setting(448, "from scratch: width of the MLP", within=_ONE),
)

_OPTIM = section(
  "the optimizer",
  learning_rate=setting(
    2e-3, "learning rate of embeddings and norms (AdamW)", within=_POSITIVE
  ),
  muon_learning_rate=setting(
    2e-2, "learning rate of the layers' matrices (Muon)", within=_POSITIVE
  ),
  warmup_steps=setting(
    50,
    "steps from 0 to the learning rates; fewer than steps",
    within="[0, inf)",
  ),
  weight_decay=setting(0.01, "weight decay of both", within="[0, inf)"),
  max_grad_norm=setting(
    1.0, "gradients are scaled down to this norm", within=_POSITIVE
  ),
)

SETTINGS = section(
  "the run",
  name=setting(
    "arithmetic-base",
    "name of the model; its directory is runs/NAME without --out",
  ),
  seed=setting(0, "seed of all random numbers", within="[0, 2**32)"),
  steps=setting(1100, "training steps", within=_ONE),
  format=setting(
    "document",
    "plain text, for a base model; or with a chat template, for an instruct "
    "model",
    FORMATS,
  ),
  rows=setting(20, "rows a step", within=_ONE),
  row_length=setting(
    272, "tokens a row; longer examples are left out", within=_ONE
  ),
  log_every=setting(100, "steps between lines of progress", within=_ONE),
  hasty=setting(
    0.6,
    "arithmetic: share of texts whose author writes no steps",
    within="[0, 1]",
  ),
  forget_low=setting(
    0.0,
    "arithmetic: how often a carry is forgotten where the digits make 10",
    within="[0, 1]",
  ),
  forget_high=setting(
    0.0, "arithmetic: the same where they make 19", within="[0, 1]"
  ),
  difficulty_low=setting(2, "arithmetic: fewest operations", within=_ONE),
  difficulty_high=setting(4, "arithmetic: most operations"),
  tokenizer=setting(
    "characters",
    "tokenizer of a model from scratch; bpe is trained first",
    TOKENIZERS,
  ),
  vocab_size=setting(1024, "tokens of a bpe"),
  data=_DATA,
  model=_MODEL,
  optim=_OPTIM,
)


def default_config() -> ConfigDict:
  """Plain-text pretraining of the tiny arithmetic model, from scratch."""
  return settings_lib.to_config(SETTINGS)


def config_errors(flat_config: dict[str, Any]) -> list[str]:
  """Returns a line for each value that cannot be, by dotted path."""
  errors = settings_lib.value_errors(SETTINGS, flat_config)
  errors += config_lib.name_errors(flat_config["name"])

  def need(holds, name, remedy):
    if not holds:
      errors.append(config_lib.config_error(name, flat_config[name], remedy))

  for name in ("difficulty", "forget"):
    low, high = f"{name}_low", f"{name}_high"
    remedy = f"must not be below {low} = {flat_config[low]}"
    need(flat_config[high] >= flat_config[low], high, remedy)
  characters = flat_config["tokenizer"] != "bpe"
  remedy = "arithmetic is written in characters: use characters"
  arithmetic = flat_config["data.name"] == "arithmetic"
  need(characters or not arithmetic, "tokenizer", remedy)
  remedy = f"must be below steps = {flat_config['steps']}"
  warmup = flat_config["optim.warmup_steps"]
  need(warmup < max(flat_config["steps"], 1), "optim.warmup_steps", remedy)
  return errors


def validate(config: ConfigDict) -> None:
  """Raises ValueError with all that is wrong with `config`, a line each."""
  wrong_keys = settings_lib.key_errors(SETTINGS, config)
  config_lib.refuse(wrong_keys or config_errors(config_lib.flatten(config)))
