"""A training run as a model directory that transformers and vLLM read.

    python -m grpojax.export RUN --out DIR [--step N]
                             [--dtype bfloat16|float32] [--adapter]

RUN is the run directory of a training run, finished or not. DIR gets the
configuration, the tokenizer with its chat template, the generation
configuration and the weights (safetensors, in files of at most 5 GB) of the
newest checkpoint, or of step N. The weights are stored as they were trained
(float32) unless --dtype says otherwise. Where the checkpoints are gone, the
weights are those of the finished run's model/.

A LoRA run is written merged into its base model; with --adapter it is written
as the peft library does, without the base model.
"""

import argparse
import pathlib
import sys

import jax

from grpojax.models.config import DTYPES
from grpojax.runtime import command_line, disk
from grpojax.training.export import export, host_device


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  parser = argparse.ArgumentParser(
    prog="python -m grpojax.export",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage=argparse.SUPPRESS,
    allow_abbrev=False,
  )
  parser.add_argument("run", help="a run directory, or its URL in a bucket")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--step", type=int, help="default: the newest")
  parser.add_argument(
    "--dtype", choices=list(DTYPES), help="default: as trained"
  )
  parser.add_argument("--adapter", action="store_true", help="LoRA only")
  flags = parser.parse_args(list(map(command_line.expand_home, argv)))
  with (
    command_line.usage_errors(),
    disk.errors(),
    jax.default_device(host_device()),
  ):
    what = export(**vars(flags))
  print(f"{what} -> {flags.out}/")


if __name__ == "__main__":
  main(sys.argv[1:])
