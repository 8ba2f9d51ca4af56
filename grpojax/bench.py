"""Times training steps with the functions of a training run.

    python -m grpojax.bench --workload=NAME
    python -m grpojax.bench --config=configs/x.py [--config.key=value ...]
                            (both: [--steps=N] [--warmup=N] [--out=FILE.json])

--workload=NAME times GRPO steps of the comparison with other libraries (sizes:
grpojax/benchmarks/workloads.py) and prints a line of JSON. Each step updates
the weights and has new prompts. `smollm2` and `smollm2_lora` have the sizes of
SmolLM2-135M. The field "variant" lists the settings you change
(--config.optim.micro_batches=1, ...).

--config=FILE times steps of a training config with random weights: of the
model it reads only config.json. Prompts are random and have
data.max_prompt_length tokens; completions have sampling.max_new_tokens. It
prints a table: seconds by part, tokens per second, FLOPs of matrix products
(without attention), and the FLOPs' share of the devices' peak, which on CPUs is
measured at the start.

Steps in which other processes took at least 8% of the CPUs do not count, unless
this holds for all steps. Standard error shows the progress.
"""

import json
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
  "workload": setting("", "name of the GRPO step to time", workloads.WORKLOADS),
  "steps": setting(8, "timed steps", within="[1, inf)"),
  "warmup": setting(
    2, "steps before timing; the first compiles", within="[0, inf)"
  ),
  "out": setting("", 'JSON file for the result; "" = none'),
}


def _parse(argv: list[str]) -> tuple[ConfigDict, ConfigDict]:
  """Returns config and flags; a workload changes the config's defaults."""
  config, flags = command_line.parse(argv, FLAGS, SETTINGS, __doc__)
  name = flags.workload
  names = ", ".join(workloads.WORKLOADS)
  if not name and not any(re.match("--?config[.=]?", word) for word in argv):
    raise ValueError(f"give --workload, one of {names}, or --config=FILE.py")
  if not name:
    return config, flags
  if any(re.match("--?config(=|$)", word) for word in argv):
    raise ValueError(f"--workload={name} has its own config: remove --config")
  default = lambda: workloads.config_of(name)
  return command_line.parse(argv, FLAGS, SETTINGS, default=default)


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  with command_line.usage_errors():
    config, flags = _parse(argv)
    if flags.out:
      disk.check_file(flags.out, "--out")
    settings = from_config(config)
    if not flags.workload:
      run = configured.open_run(settings)
  counts = flags.steps, flags.warmup
  with compilation.memory_errors():
    if flags.workload:
      report = side_by_side.measure(flags.workload, settings, *counts)
      text = json.dumps(report)
    else:
      report = configured.measure(run, *counts)
      text = "\n".join(configured.lines(report))
  try:  # write before printing, because the terminal may be closed
    if flags.out:
      with command_line.usage_errors():
        records.write_json(flags.out, report)
  finally:
    print(text, flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
