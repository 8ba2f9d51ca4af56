"""Times training steps, by the functions that training runs.

    python -m grpojax.bench --workload=NAME
    python -m grpojax.bench --config=configs/x.py [--config.key=value ...]
                            (both: [--steps=N] [--warmup=N] [--out=FILE.json])

--workload is one GRPO step of a comparison with other libraries (see
grpojax/benchmarks/workloads.py), on new prompts each time, with the weights of
the step before. It prints one JSON line. arithmetic is a step on the embedded
arithmetic-instruct with all settings at their defaults; smollm2 and
smollm2_lora have SmolLM2-135M's sizes. "variant" names changed settings
(--config.optim.micro_batches=1, ...).

--config is a step of any training config on random weights of its model's real
shapes: only the config.json of model.path is read. Prompts are random, all of
data.max_prompt_length tokens; completions have sampling.max_new_tokens. It
prints a table: seconds by part, tokens per second and operations of matrix
products (without attention), these also as a share of the devices' peak
(measured at the start on CPUs).

Steps in which other processes took at least 8% of the CPUs do not count, unless
all were so. Each step is reported on standard error.
"""

import dataclasses
import json
import pathlib
import re
import sys

from ml_collections import ConfigDict

from grpojax.benchmarks import configured, side_by_side, workloads
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records
from grpojax.training.config import SETTINGS, from_config

FLAGS = {
  "workload": setting("", "a step of a comparison", workloads.NAMES),
  "steps": setting(
    8, "steps that are timed; 10 with --workload=arithmetic", within="[1, inf)"
  ),
  "warmup": setting(
    2, "steps before them; the first compiles", within="[0, inf)"
  ),
  "out": setting("", 'also write the result to this JSON file; "" = none'),
}


def _parse(argv: list[str]) -> tuple[ConfigDict, ConfigDict]:
  """Returns config and flags; a workload has defaults of its own."""
  config, flags = command_line.parse(argv, FLAGS, SETTINGS, __doc__)
  name, names = flags.workload, ", ".join(workloads.NAMES)
  if not name and not any(re.match("--?config[.=]?", word) for word in argv):
    raise ValueError(f"give --workload, one of {names}, or --config=FILE.py")
  if not name:
    return config, flags
  if any(re.match("--?config(=|$)", word) for word in argv):
    text = "has a config of its own: give it or --config"
    raise ValueError(f"--workload={name} {text}")
  steps = dataclasses.replace(FLAGS["steps"], default=workloads.STEPS[name])
  own = FLAGS | {"steps": steps}
  default = lambda: workloads.config_of(name)
  return command_line.parse(argv, own, SETTINGS, default=default)


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    config, flags = _parse(argv)
    out = pathlib.Path(flags.out) if flags.out else None
    if out:
      disk.check_file(out, "--out")
    settings = from_config(config)
    if not flags.workload:
      run = configured.open_run(settings)
  steps = flags.steps
  warmup = flags.warmup
  with compilation.memory_errors():
    if flags.workload:
      report = side_by_side.measure(flags.workload, settings, steps, warmup)
      text = json.dumps(report)
    else:
      report = configured.measure(run, steps, warmup)
      text = "\n".join(configured.lines(report))
  try:  # first, for the screen may be gone; and so may the disk
    if out:
      with command_line.usage_errors():
        records.write_json(out, report)
  finally:
    print(text, flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
