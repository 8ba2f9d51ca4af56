"""Trains a language model with GRPO.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]
                            [--run_dir=DIR]

Without --config it runs the embedded default (see configs/arithmetic.py), or
with a model of your own (--config.model.path) configs/own_model.py. The run
directory, by default runs/NAME_OF_CONFIG, gets

    config.json         the resolved configuration
    changes.jsonl       settings that were changed when it was resumed
    lengths.npz         tokens of all prompts, so that they are measured once
    metrics.jsonl       one line a step, and one an evaluation
    samples.jsonl       sampled completions with their rewards, in whole groups,
                        and
    rewards.jsonl       how often which reward was given, step by step (both not
                        with reward.on_device: they never reach the host)
    evaluations.jsonl   which held-out answers were right
    failures.jsonl      rewards that could not be computed, with the completions
    tensorboard/        the same metrics for TensorBoard (log.trackers)
    trackers.json       what other trackers call the run
    checkpoints/        the newest states, by Orbax
    model/              the trained model, in Hugging Face format
    learning_curve.png
    report.html         all of it, to look at in a browser
    summary.json        accuracy before and after, seconds, steps, the group
                        size that the gradient's noise asked for
    profile/            a trace of some steps, where profile.steps asks for one

DIR may be a URL in a bucket (gs://, s3://; see `grpojax.runtime.files.bucket`).

The same command run again resumes; on a finished run it does nothing. What does
not change the past may differ then: steps (more of them go on with a finished
run), log.*, eval.*, checkpoint.*, stop.*, profile.*, data.too_long,
reward.workers and timeout, mesh.*, optim.micro_batches, optim.packing,
model.remat and model.reference. SIGTERM saves and exits with code 75: run the
same command again to go on. A run that goes nowhere (`stop.*`) saves, says why,
and exits with code 1; one whose held-out accuracy rises no more
(`stop.no_improvement`) ends early, and is finished.
"""

import contextlib
import functools
import sys

from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk
from grpojax.runtime.processes import distributed, interrupts
from grpojax.training.config import SETTINGS, from_config, parse_job
from grpojax.training.report import final_report
from grpojax.training.run import fit, run_storage

FLAGS = {
  "run_dir": setting("", 'where to write, a path or URL; "" = runs/NAME'),
  "coordinator": setting(
    "", "HOST:PORT of process 0; not needed on Cloud TPU, GKE, SLURM"
  ),
  "num_processes": setting("", "how many there are, with --coordinator"),
  "process_id": setting(
    "", "number of this process, from 0, with --coordinator"
  ),
}


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    program = "python -m grpojax.train"
    parse = functools.partial(
      command_line.parse, argv, FLAGS, SETTINGS, program, about=__doc__
    )
    config, flags = parse_job(parse)
    settings = from_config(config)
  compilation.keep()
  where = flags.run_dir or f"runs/{settings.name}"
  join = distributed.joined(
    flags.coordinator, flags.num_processes, flags.process_id
  )
  with contextlib.ExitStack() as stack:
    try:
      with command_line.usage_errors():
        stack.enter_context(join)
        stack.enter_context(disk.errors())
        directory, sync = stack.enter_context(run_storage.opened(where))
    except interrupts.Left as why:
      print(f"{why}; the same command starts it", file=sys.stderr)
      sys.exit(interrupts.EXIT_PREEMPTED)
    summary = fit.run(settings, directory, sync)
    with command_line.usage_errors():
      distributed.on_main(sync)  # the others wait while it is copied
    if summary is None:
      print(f"{where} is finished: nothing to do (see summary.json there)")
      lines = final_report.next_steps(where, settings)
    else:
      lines = final_report.lines(where, directory, settings, summary)
    print(*lines, sep="\n")


if __name__ == "__main__":
  main(sys.argv[1:])
