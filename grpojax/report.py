"""Writes an HTML report on one or several runs.

    python -m grpojax.report RUN [RUN ...] [--out=FILE.html]

RUN is the directory of a training run, finished or not, or its gs:// URL. The
report has curves with intervals, the distribution of rewards, completions to
browse, the gradient's noise if it was diagnosed, failures, settings, and time
by part. Several runs share their plots, and each is compared with the first:
held-out answers prompt by prompt, metrics step by step. The file needs
no network and no other files. The default is report.html, in the run directory
if there is a single run and it is on disk, else in the working directory.
"""

import pathlib
import sys
from collections.abc import Sequence

from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records, run_storage
from grpojax.runtime.terminal.screen import printable
from grpojax.training.files import run_directory
from grpojax.training.report import run_report

FLAGS = {"out": setting("", 'HTML file; "" = report.html (in RUN if only one)')}
SETTINGS = None


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  runs = []
  flags = []
  for before, word in zip(["", *argv], argv, strict=False):
    is_value = before in ("--out", "-out")
    (flags if word.startswith("-") or is_value else runs).append(word)
  return [command_line.expand_home(run) for run in runs], flags


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  runs, words = _split(argv)
  with command_line.usage_errors(), disk.errors():
    _, flags = command_line.parse(words, FLAGS, SETTINGS, __doc__)
    if not runs:
      raise ValueError("give the directory of a training run, or several")
    paths = [run_storage.local(run) for run in runs]
    in_buckets = any(map(run_storage.is_url, runs))
    text = run_report.report(paths, runs if in_buckets else None)
    in_run = len(runs) == 1 and not in_buckets
    default = pathlib.Path(runs[0] if in_run else "") / run_directory.REPORT
    out = pathlib.Path(flags.out) if flags.out else default
    if out.is_symlink() and not flags.out:
      out.unlink()  # a foreign run may contain a link to another file
    disk.check_file(out, "--out")
    records.write_text(out, text)
  print(printable(f"{', '.join(runs)} -> {out}"))


if __name__ == "__main__":
  main(sys.argv[1:])
