"""Times training steps, by the functions that training runs.

    python -m grpojax.bench --workload=fixed|tail|long_prompt|arithmetic
                            [--steps=N] [--warmup=N] [--out=F.json]
                            [--config.key=value ...]

runs one GRPO step of a comparison with other libraries (see
grpojax/benchmarks/workloads.py), each time on new prompts with the weights of
the step before, and prints one JSON line. arithmetic is the default job of
`python -m grpojax.train`. Settings of how it is computed may be changed
(optim.micro_batches, model.remat, ...), and are then in "variant"; those of
what is computed may not. PEERS_MODEL_DIR may name a directory of the decoder's
weights; without it they are drawn. Steps in which other processes took 8% of
the machine or more do not count, where there are others.
"""

import json
import pathlib
import sys

from grpojax.benchmarks import side_by_side, workloads
from grpojax.runtime import command_line, records
from grpojax.runtime import config as config_lib
from grpojax.training.config import WORDS, default_config, validate
from grpojax.training.validation import CHOICES

FLAGS = {
  "workload": ("", f"a step of a comparison: {', '.join(workloads.NAMES)}"),
  "steps": (8, "that are timed; 10 of arithmetic"),
  "warmup": (2, "steps before them; the first compiles"),
  "out": ("", "also write the result to this JSON file"),
}
PROGRAM = "python -m grpojax.bench"


def _parse(argv: list[str]):
  """The config and the flags."""
  if {"--help", "-h", "-help"} & {*argv}:
    print(__doc__)
  config, flags = command_line.parse(
    argv, FLAGS, default_config, PROGRAM, WORDS, CHOICES
  )
  name = flags.workload
  if not name:
    raise ValueError(f"give --workload, one of {', '.join(workloads.NAMES)}")
  if name not in workloads.NAMES:
    names = ", ".join(workloads.NAMES)
    raise ValueError(f"--workload={name}: use one of {names}")
  own = workloads.config_of(name)
  steps = workloads.STEPS[name], FLAGS["steps"][1]
  config, flags = command_line.parse(
    argv, FLAGS | {"steps": steps}, lambda: own, PROGRAM, WORDS, CHOICES
  )
  before = config_lib.flatten(own)
  for key, value in config_lib.flatten(config).items():
    if value != before.get(key) and workloads.is_work(key):
      raise ValueError(
        f"--config.{key}={value}: --workload={name} is that work and no other; "
        "settings of how it is computed can be changed, as model.remat"
      )
  return config, flags


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    config, flags = _parse(argv)
    for name, least in (("steps", 1), ("warmup", 0)):
      if flags[name] < least:
        raise ValueError(f"--{name}={flags[name]}: must be {least} or more")
    out = pathlib.Path(flags.out) if flags.out else None
    if out:
      records.check_writable(out)
    validate(config)
  found = side_by_side.measure(
    flags.workload, config, flags.steps, flags.warmup
  )
  if out:
    records.write_json(out, found)
  print(json.dumps(found), flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
