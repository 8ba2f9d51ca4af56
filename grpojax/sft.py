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

import pathlib
import sys

from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.training.sft import sft
from grpojax.training.sft.sft_config import SETTINGS

FLAGS = {"out": setting("", 'directory to write; "" = runs/NAME')}


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  compilation.keep()
  program = "python -m grpojax.sft"
  with command_line.usage_errors():
    config, flags = command_line.parse(
      argv, FLAGS, SETTINGS, program, about=__doc__
    )
  out = pathlib.Path(flags.out or pathlib.Path("runs") / config.name)
  sft.run(config, out, " ".join([program, *argv]))
  print(f"wrote {out}")


if __name__ == "__main__":
  main(sys.argv[1:])
