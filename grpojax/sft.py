r"""Supervised fine-tuning: makes the models that GRPO starts from.

    python -m grpojax.sft [--config=configs/x.py] [--config.key=value ...]
                          [--out=DIR]

Trains a decoder from scratch or from a Hugging Face directory, and writes a
Hugging Face directory. The texts are random arithmetic, or the prompts and
solutions of a data set's training split. The sft.json of each bundled model (in
grpojax/assets) has the command that trained it. This command trains a model
with a new tokenizer on GSM8K:

    python -m grpojax.sft --config.data.name=gsm8k --config.data.path=DIR \
        --config.format=dialogue --config.tokenizer=bpe
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from ml_collections import ConfigDict

from grpojax.core.logprobs import logprobs_and_load
from grpojax.core.options import NOT_NEGATIVE, ONE_OR_MORE, POSITIVE
from grpojax.core.random_keys import seed_key
from grpojax.core.types import Tokens
from grpojax.data import datasets
from grpojax.data import texts as texts_lib
from grpojax.models import huggingface as hf
from grpojax.models.transformer import transformer
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line, configs, settings
from grpojax.runtime.cli.settings import free_section, section, setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.text import tokenization
from grpojax.runtime.text.special_tokens import SPECIAL_TOKENS
from grpojax.training.files.sources import find_model, pinned
from grpojax.training.run import memory

_count = functools.partial(setting, within=ONE_OR_MORE)
_not_negative = functools.partial(setting, within=NOT_NEGATIVE)
_positive = functools.partial(setting, within=POSITIVE)
_share = functools.partial(setting, within="[0, 1]")

SETTINGS = section(
  "the run",
  name=setting("arithmetic-base", "name of the model and its directory"),
  seed=setting(0, "random seed", within="[0, 2**32)"),
  steps=_count(1100, "training steps"),
  format=setting(
    "document",
    "plain text for a base model, or chat turns for an instruct model",
    ("document", "dialogue"),
  ),
  rows=_count(20, "rows per step"),
  row_length=_count(272, "tokens per row; longer examples are dropped"),
  log_every=_count(100, "steps between progress lines"),
  hasty=_share(0.6, "arithmetic: share of texts without steps"),
  forget_low=_share(0.0, "arithmetic: share of carries lost at column sum 10"),
  forget_high=_share(0.0, "arithmetic: share of carries lost at column sum 19"),
  difficulty_low=_count(2, "arithmetic: smallest number of operations"),
  difficulty_high=setting(4, "arithmetic: largest number of operations"),
  tokenizer=setting(
    "characters", "tokenizer of a new model", ("characters", "bpe")
  ),
  vocab_size=setting(1024, "tokens of a new bpe tokenizer"),
  data=section(
    "texts",
    name=setting("arithmetic", "data set; arithmetic is generated"),
    path=setting("", "file, directory, glob pattern, or ORG/NAME of the Hub"),
    options=free_section("keyword arguments of the data set's load function"),
    template=setting("{prompt}\n", "template of plain-text prompts"),
    special_tokens=setting(
      "text", "how special tokens in texts are read", SPECIAL_TOKENS
    ),
    learn_prompts=setting(False, "also compute the loss on prompts"),
  ),
  model=section(
    "model",
    path=setting(
      "", 'directory, .gguf file, bundled model or ORG/NAME; "" = from scratch'
    ),
    ignore_keys=setting((), "unknown keys of config.json to ignore"),
    width=_count(128, "from scratch: width"),
    layers=_count(4, "from scratch: number of layers"),
    heads=_count(4, "from scratch: number of query heads"),
    kv_heads=_count(2, "from scratch: number of key-value heads"),
    mlp=_count(448, "from scratch: width of the MLP"),
  ),
  optim=section(
    "optimizer",
    learning_rate=_positive(2e-3, "learning rate of AdamW (embeddings, norms)"),
    muon_learning_rate=_positive(2e-2, "learning rate of Muon (matrices)"),
    warmup_steps=_not_negative(50, "warmup steps, fewer than steps"),
    weight_decay=_not_negative(0.01, "weight decay of layers' matrices"),
    max_grad_norm=_positive(1.0, "gradient clipping norm"),
  ),
)

FLAGS = {"out": setting("", 'directory to write; "" = runs/NAME')}


def validate(config: ConfigDict) -> None:
  """Raises ValueError with a line per error of `config`."""
  configs.refuse(settings.key_errors(SETTINGS, config))
  values = configs.flatten(config)
  errors = settings.value_errors(SETTINGS, values)
  errors += configs.name_errors(config.name)
  wrong = {}
  for name in ("difficulty", "forget"):
    low = f"{name}_low"
    if values[f"{name}_high"] < values[low]:
      wrong[f"{name}_high"] = f"must not be below {low} = {values[low]}"
  if config.tokenizer == "bpe" and config.data.name == "arithmetic":
    wrong["tokenizer"] = "is not available for arithmetic: use characters"
  if config.optim.warmup_steps >= max(config.steps, 1):
    wrong["optim.warmup_steps"] = f"must be below steps = {config.steps}"
  errors += [configs.config_error(x, values[x], wrong[x]) for x in wrong]
  configs.refuse(errors)


def load_examples(config: ConfigDict):
  """Returns the training split; None for arithmetic, which is generated."""
  data = config.data
  if data.name == "arithmetic":
    return None
  options = data.options.to_dict()
  return datasets.load(data.name, "train", data.path, options, seed=config.seed)


def fresh_directory(path: pathlib.Path, config: ConfigDict, examples) -> None:
  """Writes config.json and the tokenizer of a new model."""
  tokenizer = tokenization.character_tokenizer()
  if config.tokenizer == "bpe":
    strings = texts_lib.strings(examples)
    tokenizer = tokenization.train_bpe(strings, config.vocab_size)
  tokenizer.save_pretrained(str(path))
  sizes = "width layers heads kv_heads mlp".split()
  hf.write_config(
    path,
    vocab_size=len(tokenizer),
    pad_id=tokenizer.pad_token_id,
    eos_id=tokenizer.eos_token_id,
    **{key: config.model[key] for key in sizes},
  )


def set_format(path: pathlib.Path, tokenizer, config: ConfigDict) -> None:
  """Writes the chat template and the EOS ids of `config.format` to `path`.

  In arithmetic documents a blank line ends a problem, so it is an EOS too.
  """
  eos = [tokenizer.eos_token_id]
  is_arithmetic = config.data.name == "arithmetic"
  if config.format == "dialogue":
    if is_arithmetic or not tokenizer.chat_template:
      tokenizer.chat_template = tokenization.CHAT_TEMPLATE
      tokenizer.save_pretrained(str(path))
  elif is_arithmetic:
    blank = tokenizer.encode("\n\n", add_special_tokens=False)
    if len(blank) != 1:
      raise ValueError("the tokenizer has no blank-line token: use dialogue")
    eos += blank
  elif tokenizer.chat_template:
    raise ValueError(
      "--config.format = document: the model has a chat template: use dialogue"
    )
  generation = {"eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
  (path / "generation_config.json").write_text(json.dumps(generation, indent=2))


def texts(
  config: ConfigDict, tokenizer, examples=None
) -> Iterator[texts_lib.Text]:
  """Returns an endless iterator of (context ids, learned ids).

  `set_format` must have prepared `tokenizer`; `examples` are from
  `load_examples`. ValueError if all examples are too long.
  """
  data = config.data
  encode = functools.partial(
    tokenization.encode_text, tokenizer, special_tokens=data.special_tokens
  )
  if examples is None:
    return texts_lib.arithmetic_texts(
      config.format,
      encode,
      eos_id=tokenizer.eos_token_id,
      seed=config.seed,
      difficulty=(config.difficulty_low, config.difficulty_high),
      hasty=config.hasty,
      forget=(config.forget_low, config.forget_high),
    )

  def encode_prompt(prompt):
    return tokenization.encode_prompt(
      tokenizer, prompt, data.template, special_tokens=data.special_tokens
    )[1]

  encoded, dropped = texts_lib.encode_examples(
    examples,
    encode_prompt,
    encode,
    eos_id=tokenizer.eos_token_id,
    longest=config.row_length,
    learn_prompts=data.learn_prompts,
  )
  tokens = sum(len(context) + len(learned) for context, learned in encoded)
  print(
    f"{len(encoded)} texts, {tokens} tokens; dropped {dropped} texts with more "
    f"than {config.row_length} tokens"
  )
  return texts_lib.epochs(encoded, config.seed)


def make_tx(config: ConfigDict) -> optax.GradientTransformation:
  """Returns Muon (Jordan et al. 2024) for layers' matrices, otherwise AdamW.

  Both have a linear warmup and a cosine decay to 1% of the peak.
  """
  optim = config.optim

  def schedule(peak):
    return optax.warmup_cosine_decay_schedule(
      0.0, peak, optim.warmup_steps, config.steps, 0.01 * peak
    )

  def matrices(params):
    each = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree_util.tree_map_with_path(
      lambda path, x: each if path[0].key == "layers" and x.ndim == 3 else None,
      params,
    )

  return optax.chain(
    optax.clip_by_global_norm(optim.max_grad_norm),
    optax.contrib.muon(
      schedule(optim.muon_learning_rate),
      weight_decay=optim.weight_decay,
      muon_weight_dimension_numbers=matrices,
      adam_b2=0.95,
      adam_learning_rate=schedule(optim.learning_rate),
    ),
  )


def make_step(lm, tx):
  """Compiles `(params, opt_state, rows) -> (params, opt_state, loss)`."""

  def loss_fn(params, rows: texts_lib.Rows):
    n = rows.ids.shape[0]
    # Rows are completions of an empty prompt.
    tokens = Tokens(
      jnp.zeros((n, 1), jnp.int32),
      jnp.zeros((n, 1), bool),
      rows.ids[:, None],
      positions=rows.positions[:, None],
      segments=rows.segments[:, None],
    )
    logprobs = logprobs_and_load(lm, params, tokens).logprobs[:, 0]
    return -jnp.sum(logprobs * rows.weights) / jnp.sum(rows.weights)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(params, rows)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def fit(config: ConfigDict, lm, params, stream):
  """Trains a model; returns parameters and rows {"step": ..., "loss": ...}."""
  tx = make_tx(config)
  opt_state = tx.init(params)
  step = make_step(lm, tx)
  steps = config.steps
  batches = texts_lib.pack(stream, config.rows, config.row_length)
  losses = []
  began = time.perf_counter()
  for i, rows in enumerate(itertools.islice(batches, steps), 1):
    params, opt_state, loss = step(params, opt_state, rows)
    if i % config.log_every == 0 or i == steps:
      loss = float(loss)
      losses.append({"step": i, "loss": loss})
      left = (time.perf_counter() - began) / i * (steps - i)
      text = f"step {i}/{steps}  loss {loss:.4f}  left {left:.0f} s"
      print(text, flush=True)
  return params, losses


def start(config: ConfigDict, source: pathlib.Path):
  """Returns model, parameters and texts; writes the model's files to `source`.

  All errors (ValueError) are raised before compilation.
  """
  examples = load_examples(config)
  if config.model.path:
    directory = find_model(config.model.path)
    hf.copy_files(directory, source)
  else:
    directory = source
    fresh_directory(source, config, examples)
  keys = config.model.ignore_keys
  shape = hf.to_transformer_config(hf.read_config(directory, keys))
  if config.row_length > shape.rope.longest:
    raise ValueError(
      f"--config.row_length={config.row_length}: texts of more than "
      f"{shape.rope.longest} tokens need long_factor (longrope), which is not "
      "supported: use a lower row_length"
    )
  memory.refuse(memory.fine_tuning(shape, config.rows, config.row_length))
  tokenizer = tokenization.load(source)
  gaps = tokenization.gaps(tokenizer, shape.vocab_size)
  lm = transformer(dataclasses.replace(shape, gaps=gaps))
  if config.model.path:
    params = hf.load_params(directory, ignore_keys=keys)
  else:
    params = lm.init(seed_key(config.seed))
  set_format(source, tokenizer, config)
  stream, ahead = itertools.tee(texts(config, tokenizer, examples))
  next(texts_lib.pack(ahead, 4 * config.rows, config.row_length))
  return lm, params, stream


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  compilation.keep()
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    with command_line.usage_errors():
      config, flags = command_line.parse(argv, FLAGS, SETTINGS, __doc__)
      out = pathlib.Path(flags.out or pathlib.Path("runs") / config.name)
      validate(config)
      if out.exists():
        raise ValueError(
          f"{out} exists already: remove it, or use another --out"
        )
      disk.check_writable(out, "--out")
      config.model.path = pinned(config.model.path)  # for sft.json
      lm, params, stream = start(config, source)
    count = sum(x.size for x in jax.tree.leaves(params))
    tokens = config.rows * config.row_length
    print(f"{count} parameters, {tokens} tokens per step", flush=True)
    began = time.perf_counter()
    params, losses = fit(config, lm, params, stream)
    record = {
      "command": " ".join(["python -m grpojax.sft", *argv]),
      "config": config.to_dict(),
      "seconds": time.perf_counter() - began,
      "losses": losses,
    }
    # A random name, because another process may write the same directory.
    whole = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
      hf.save(whole, params, source, ignore_keys=config.model.ignore_keys)
      records.write_json(whole / "sft.json", record)
    except BaseException:
      shutil.rmtree(whole, ignore_errors=True)
      raise
    if out.exists():
      sys.exit(f"{out} was created meanwhile: the trained model is in {whole}")
    whole.rename(out)
  print(f"wrote {out}")


if __name__ == "__main__":
  main(sys.argv[1:])
