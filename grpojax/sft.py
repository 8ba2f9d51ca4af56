r"""Supervised fine-tuning: makes the models that GRPO starts from.

    python -m grpojax.sft [--config=configs/x.py] [--config.key=value ...]
                          [--out=DIR]

Trains a decoder on texts, from scratch or from a Hugging Face directory, and
writes a Hugging Face directory. The embedded models were made by

    python -m grpojax.sft --config.name=arithmetic-base
    python -m grpojax.sft --config.name=arithmetic-instruct \
        --config.format=dialogue --config.model.path=arithmetic-base \
        --config.steps=400 --config.optim.muon_learning_rate=5e-3 \
        --config.optim.learning_rate=5e-4
"""

import functools
import itertools
import json
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from ml_collections import ConfigDict

from grpojax.core.logprobs import token_logprobs
from grpojax.data import arithmetic
from grpojax.data.packing import Rows, pack
from grpojax.models import hf
from grpojax.models.transformer import transformer
from grpojax.runtime import command_line, metrics
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.runtime.config import flatten

FORMATS = ("document", "dialogue")


def default_config() -> ConfigDict:
  """Plain-text pretraining of the tiny arithmetic model, from scratch."""
  config = ConfigDict()
  config.name = "arithmetic-base"
  config.seed = 0
  config.steps = 1100
  config.format = "document"  # or "dialogue"
  config.rows = 20  # rows a step
  config.row_length = 272  # tokens a row
  config.hasty = 0.6  # share of texts whose author writes no steps
  config.difficulty_low = 2
  config.difficulty_high = 4
  config.log_every = 100
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


def validate(config: ConfigDict) -> None:
  """Raises ValueError with all that is wrong with `config`, a line each."""
  known, given = flatten(default_config()).keys(), flatten(config).keys()
  if known != given:
    raise ValueError(
      "this is not a configuration of grpojax.sft; unknown: "
      f"{sorted(given - known)}, missing: {sorted(known - given)}"
    )
  found = []
  for name in ("width", "layers", "heads", "kv_heads", "mlp"):
    if config.model[name] < 1:
      found.append(f"model.{name} = {config.model[name]}: must be 1 or more")
  if config.format not in FORMATS:
    found.append(f"format = {config.format!r}: use one of {', '.join(FORMATS)}")
  for name in ("steps", "rows", "row_length", "difficulty_low", "log_every"):
    if config[name] < 1:
      found.append(f"{name} = {config[name]}: must be 1 or more")
  if config.difficulty_high < config.difficulty_low:
    found.append("difficulty_high: must not be below difficulty_low")
  if not 0 <= config.hasty <= 1:
    found.append(f"hasty = {config.hasty}: is a probability")
  for name in ("learning_rate", "muon_learning_rate", "max_grad_norm"):
    if not config.optim[name] > 0:
      found.append(f"optim.{name} = {config.optim[name]}: must be more than 0")
  if not 0 <= config.optim.warmup_steps < config.steps:
    found.append("optim.warmup_steps: must be 0 or more, and below steps")
  if found:
    raise ValueError("the configuration is wrong:\n  " + "\n  ".join(found))


def fresh_directory(path: pathlib.Path, config: ConfigDict) -> None:
  """Writes config.json and tokenizer of a new arithmetic model to `path`."""
  tokenizer = tokenizer_lib.character_tokenizer()
  tokenizer.save_pretrained(str(path))
  model = config.model
  (path / "config.json").write_text(
    json.dumps(
      {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": model.width,
        "intermediate_size": model.mlp,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
      },
      indent=2,
    )
  )


def set_format(path: pathlib.Path, tokenizer, form: str) -> None:
  """Gives a model directory the chat template and the EOS of its texts.

  A document's problems end with a blank line, so that ends a completion too.
  """
  eos = [tokenizer.eos_token_id]
  if form == "dialogue":
    tokenizer.chat_template = tokenizer_lib.CHAT_TEMPLATE
    tokenizer.save_pretrained(str(path))
  else:
    blank = tokenizer.encode("\n\n", add_special_tokens=False)
    if len(blank) != 1:
      raise ValueError(
        "documents need a tokenizer that writes a blank line as one token"
      )
    eos += blank
  generation = {"eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
  (path / "generation_config.json").write_text(json.dumps(generation, indent=2))


def texts(config: ConfigDict, tokenizer, seed: int):
  """Endless (context ids, learned ids) of the config's format."""
  rng = np.random.default_rng(seed)
  encode = functools.partial(tokenizer.encode, add_special_tokens=False)
  difficulty = (config.difficulty_low, config.difficulty_high)
  options = {"difficulty": difficulty, "hasty": config.hasty}
  while True:
    prompt, text = "", ""
    if config.format == "dialogue":
      prompt, text = arithmetic.dialogue(rng, **options)
    else:
      text = arithmetic.document(rng, most=3, **options)
    yield (
      encode(prompt) if prompt else [],
      [
        *encode(text),
        tokenizer.eos_token_id,
      ],
    )


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
      chunk_size=64,
    )
    return -jnp.sum(logprobs[:, 0] * rows.weights) / jnp.sum(rows.weights)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(params, rows)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def fit(config: ConfigDict, lm, params, tokenizer):
  """Runs the optimizer; returns the parameters and (step, loss) records."""
  tx = make_tx(config)
  opt_state, step = tx.init(params), make_step(lm, tx)
  batches = pack(
    texts(config, tokenizer, config.seed), config.rows, config.row_length
  )
  began, records = time.time(), []
  for i, rows in enumerate(itertools.islice(batches, config.steps), 1):
    params, opt_state, loss = step(params, opt_state, rows)
    if i % config.log_every == 0 or i == config.steps:
      records.append({"step": i, "loss": float(loss)})
      left = (time.time() - began) / i * (config.steps - i)
      print(
        f"step {i}/{config.steps}  loss {float(loss):.4f}  left {left:.0f} s",
        flush=True,
      )
  return params, records


def start(config: ConfigDict, source: pathlib.Path):
  """The model and tokenizer to start from; their files go to `source`.

  Raises:
    ValueError: what does not fit, found before anything compiles.
  """
  if config.model.path:
    directory = hf.resolve(config.model.path)
    hf.copy_files(directory, source)
    lm, params = hf.load(directory)
  else:
    fresh_directory(source, config)
    lm = transformer(hf.to_transformer_config(hf.read_config(source)))
    params = lm.init(jax.random.key(config.seed))
  tokenizer = tokenizer_lib.load(source)
  set_format(source, tokenizer, config.format)
  stream = texts(config, tokenizer, config.seed)
  next(pack(stream, 4 * config.rows, config.row_length))
  return lm, params, tokenizer


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    with command_line.usage_errors():
      config, flags = command_line.parse(
        argv,
        {"out": ("", "directory to write; default runs/NAME")},
        default_config,
        program="python -m grpojax.sft",
      )
      validate(config)
      out = pathlib.Path(flags.out or pathlib.Path("runs") / config.name)
      if out.exists():
        raise ValueError(
          f"{out} exists already; remove it or give another --out"
        )
      lm, params, tokenizer = start(config, source)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(
      f"{count} parameters, {config.rows * config.row_length} tokens a step"
    )
    began = time.time()
    params, records = fit(config, lm, params, tokenizer)
    hf.save(out, params, source)
  metrics.write_json(
    out / "sft.json",
    {
      "command": " ".join(["python -m grpojax.sft", *argv]),
      "config": config.to_dict(),
      "seconds": time.time() - began,
      "losses": records,
    },
  )
  print(f"wrote {out}")


if __name__ == "__main__":
  main(sys.argv[1:])
