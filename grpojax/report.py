"""Writes a report on runs: one HTML file, to be opened in any browser.

    python -m grpojax.report RUN [RUN ...] [--out FILE.html]

RUN is the run directory of a training run, finished or not, or its URL in a
bucket. The report has curves with intervals, the distribution of rewards,
completions to browse, the noise of the gradient where it was diagnosed,
failures, settings, and where the time went. Several runs are drawn over each
other, and each is compared with the first: held-out answers prompt by prompt,
metrics step by step. The file needs no network and nothing beside it.

FILE is report.html, in the run directory of a single run on a disk, else here.
"""

import argparse
import pathlib
import sys

from grpojax.runtime import bucket, command_line, disk, records
from grpojax.training import report, run_directory, run_storage


def _name(run: str) -> str | None:
  """What a run in a bucket is called; None is by its directory."""
  return run.rstrip("/") if bucket.is_url(run) else None


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  parser = argparse.ArgumentParser(
    prog="python -m grpojax.report",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage=argparse.SUPPRESS,
    allow_abbrev=False,
  )
  parser.add_argument("runs", nargs="+", metavar="RUN")
  parser.add_argument("--out", type=pathlib.Path, metavar="FILE.html")
  flags = parser.parse_args(list(map(command_line.expand_home, argv)))
  out = flags.out or pathlib.Path(run_directory.REPORT)
  if flags.out is None and len(flags.runs) == 1 and not _name(flags.runs[0]):
    out = pathlib.Path(flags.runs[0]) / run_directory.REPORT
  with command_line.usage_errors(), disk.errors():
    paths = [run_storage.local(run) for run in flags.runs]
    names = list(map(_name, flags.runs))
    text = report.report(paths, names if all(names) else None)
    records.check_writable(out)
    records.write_text(out, text)
  print(f"{', '.join(flags.runs)} -> {out}")


if __name__ == "__main__":
  main(sys.argv[1:])
