r"""Supervised fine-tuning: makes the models that GRPO starts from.

    python -m grpojax.sft [--config=configs/x.py] [--config.key=value ...]
                          [--out=DIR]

Trains a decoder on texts, from scratch or from a Hugging Face directory, and
writes a Hugging Face directory. The texts are arithmetic, drawn anew, or the
prompts and solutions of a data set's training split. The embedded models were
made by

    python -m grpojax.sft --config.name=arithmetic-base
    python -m grpojax.sft --config.name=arithmetic-instruct \
        --config.format=dialogue --config.model.path=arithmetic-base \
        --config.steps=400 --config.optim.muon_learning_rate=5e-3 \
        --config.optim.learning_rate=5e-4
    python -m grpojax.sft --config.name=arithmetic-careless \
        --config.format=dialogue --config.model.path=arithmetic-instruct \
        --config.hasty=0 --config.forget_low=0.35 --config.forget_high=0.95 \
        --config.steps=150 --config.rows=10 --config.log_every=25 \
        --config.optim.muon_learning_rate=5e-3 --config.optim.learning_rate=5e-4

and a model of GSM8K, with a tokenizer of its own, by

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

from grpojax.core.logprobs import token_logprobs
from grpojax.core.random_keys import seed_key
from grpojax.data import datasets
from grpojax.data import texts as texts_lib
from grpojax.data.texts import Rows, pack
from grpojax.models import huggingface as hf
from grpojax.models.transformer import transformer
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli import settings as settings_lib
from grpojax.runtime.cli.settings import free_section, section, setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.runtime.text.special_tokens import SPECIAL_TOKENS
from grpojax.training import policy as policy_lib
from grpojax.training.run import memory

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
  ignore_keys=setting((), "unknown keys of config.json that change nothing"),
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
  weight_decay=setting(
    0.01, "weight decay of the layers' matrices", within="[0, inf)"
  ),
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

FLAGS = {"out": setting("", 'directory to write; "" = runs/NAME')}


def default_config() -> ConfigDict:
  """Plain-text pretraining of the tiny arithmetic model, from scratch."""
  return settings_lib.to_config(SETTINGS)


def validate(config: ConfigDict) -> None:
  """Raises ValueError with all that is wrong with `config`, a line each."""
  config_lib.refuse(settings_lib.key_errors(SETTINGS, config))
  flat_config = config_lib.flatten(config)
  errors = settings_lib.value_errors(SETTINGS, flat_config)
  errors += config_lib.name_errors(config.name)

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
  config_lib.refuse(errors)


def load_examples(config: ConfigDict):
  """The data set's training split; None for arithmetic, which is drawn."""
  if config.data.name == "arithmetic":
    return None
  data = config.data
  options = data.options.to_dict()
  return datasets.load(data.name, "train", data.path, options, seed=config.seed)


def fresh_directory(path: pathlib.Path, config: ConfigDict, examples) -> None:
  """Writes config.json and tokenizer of a new model to `path`."""
  tokenizer = tokenizer_lib.character_tokenizer()
  if config.tokenizer == "bpe":
    tokenizer = tokenizer_lib.train_bpe(
      texts_lib.strings(examples), config.vocab_size
    )
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
  """Gives a model directory the chat template and the EOS of its texts.

  In arithmetic documents a blank line ends a problem, so it ends a completion.
  """
  eos = [tokenizer.eos_token_id]
  drawn = config.data.name == "arithmetic"
  if config.format == "dialogue":
    if drawn or not tokenizer.chat_template:
      tokenizer.chat_template = tokenizer_lib.CHAT_TEMPLATE
      tokenizer.save_pretrained(str(path))
  elif drawn:
    blank = tokenizer.encode("\n\n", add_special_tokens=False)
    if len(blank) != 1:
      raise ValueError(
        "documents need a tokenizer that writes a blank line as one token"
      )
    eos += blank
  elif tokenizer.chat_template:
    raise ValueError(
      "--config.format = document: this model has a chat template; use dialogue"
    )
  generation = {"eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
  (path / "generation_config.json").write_text(json.dumps(generation, indent=2))


def texts(
  config: ConfigDict, tokenizer, examples=None
) -> Iterator[texts_lib.Text]:
  """Endless (context ids, learned ids) of the config's format.

  The tokenizer is of `set_format`, the examples are of `load_examples`.

  Raises:
    ValueError: no example is short enough.
  """
  special_tokens = config.data.special_tokens
  encode = functools.partial(
    tokenizer_lib.encode_text, tokenizer, special_tokens=special_tokens
  )
  encode_prompt = functools.partial(
    tokenizer_lib.encode_prompt,
    tokenizer,
    template=config.data.template,
    special_tokens=special_tokens,
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
  encoded, dropped = texts_lib.encode_examples(
    examples,
    lambda prompt: encode_prompt(prompt)[1],
    encode,
    eos_id=tokenizer.eos_token_id,
    longest=config.row_length,
    learn_prompts=config.data.learn_prompts,
  )
  tokens = sum(len(context) + len(learned) for context, learned in encoded)
  print(
    f"{len(encoded)} texts, {tokens} tokens; left out, of more than "
    f"{config.row_length} tokens: {dropped}"
  )
  return texts_lib.epochs(encoded, config.seed)


def make_tx(config: ConfigDict) -> optax.GradientTransformation:
  """Muon on the layers' matrices, AdamW on the rest (Jordan et al., 2024).

  Both under a warm-up and a cosine decay to 1% of the peak.
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
  """`(params, opt_state, rows) -> (params, opt_state, loss)`, jitted."""

  def loss_fn(params, rows: Rows):
    n = rows.ids.shape[0]
    # Rows are completions of an empty prompt.
    logprobs, _ = token_logprobs(
      lm,
      params,
      jnp.zeros((n, 1), jnp.int32),
      jnp.zeros((n, 1), bool),
      rows.ids[:, None],
      positions=rows.positions[:, None],
      segments=rows.segments[:, None],
    )
    return -jnp.sum(logprobs[:, 0] * rows.weights) / jnp.sum(rows.weights)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(params, rows)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def fit(config: ConfigDict, lm, params, stream):
  """Runs the optimizer; returns the parameters and (step, loss) losses."""
  tx = make_tx(config)
  opt_state, step = tx.init(params), make_step(lm, tx)
  batches = pack(stream, config.rows, config.row_length)
  began, losses = time.perf_counter(), []
  for i, rows in enumerate(itertools.islice(batches, config.steps), 1):
    params, opt_state, loss = step(params, opt_state, rows)
    if i % config.log_every == 0 or i == config.steps:
      losses.append({"step": i, "loss": float(loss)})
      left = (time.perf_counter() - began) / i * (config.steps - i)
      print(
        f"step {i}/{config.steps}  loss {float(loss):.4f}  left {left:.0f} s",
        flush=True,
      )
  return params, losses


def start(config: ConfigDict, source: pathlib.Path):
  """The model to start from, whose files go to `source`, and the texts.

  Raises:
    ValueError: what does not fit, found before anything compiles.
  """
  examples = load_examples(config)
  if config.model.path:
    directory = policy_lib.find_model(config.model.path)
    hf.copy_files(directory, source)
  else:
    directory = source
    fresh_directory(source, config, examples)
  keys = config.model.ignore_keys
  shape = hf.to_transformer_config(hf.read_config(directory, keys))
  memory.refuse(memory.fine_tuning(shape, config.rows, config.row_length))
  tokenizer = tokenizer_lib.load(source)
  gaps = tokenizer_lib.gaps(tokenizer, shape.vocab_size)
  lm = transformer(dataclasses.replace(shape, gaps=gaps))
  if config.model.path:
    params = hf.load_params(directory, ignore_keys=keys)
  else:
    params = lm.init(seed_key(config.seed))
  set_format(source, tokenizer, config)
  stream, ahead = itertools.tee(texts(config, tokenizer, examples))
  next(pack(ahead, 4 * config.rows, config.row_length))
  return lm, params, stream


def run(config: ConfigDict, out: pathlib.Path, command: str) -> None:
  """Trains, and writes the model directory `out`, whole or not at all.

  What was called, `command`, stands in `out`/sft.json.

  Raises:
    SystemExit: with a message, where it cannot be started.
  """
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    with command_line.usage_errors():
      validate(config)
      if out.exists():
        raise ValueError(f"{out} exists already; remove it, or use another")
      disk.check_writable(out, "--out")
      config.model.path = policy_lib.pinned(config.model.path)  # for the record
      lm, params, stream = start(config, source)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(
      f"{count} parameters, {config.rows * config.row_length} tokens a step",
      flush=True,
    )
    began = time.perf_counter()
    params, losses = fit(config, lm, params, stream)
    record = {
      "command": command,
      "config": config.to_dict(),
      "seconds": time.perf_counter() - began,
      "losses": losses,
    }
    # A name of its own: another process may be making the same directory.
    whole = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
      hf.save(whole, params, source, ignore_keys=config.model.ignore_keys)
      records.write_json(whole / "sft.json", record)
    except BaseException:
      shutil.rmtree(whole, ignore_errors=True)
      raise
    if out.exists():
      sys.exit(f"{out} exists by now; what was trained here is in {whole}")
    whole.rename(out)


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  compilation.keep()
  with command_line.usage_errors():
    config, flags = command_line.parse(argv, FLAGS, SETTINGS, __doc__)
  out = pathlib.Path(flags.out or pathlib.Path("runs") / config.name)
  run(config, out, " ".join(["python -m grpojax.sft", *argv]))
  print(f"wrote {out}")


if __name__ == "__main__":
  main(sys.argv[1:])
