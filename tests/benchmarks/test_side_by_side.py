"""The JSON line of a workload, and proof that the work was done."""

from grpojax.benchmarks import clock, side_by_side, workloads
from grpojax.training.config import from_config

KEYS = (  # shared by all libraries of the comparison
  "peer variant workload steps quiet others_cpu seconds per_step first_step_s "
  "warmup_s tokens_per_step longest gen_tokens_per_s step_tokens_per_s "
  "lengths_as_planned peak_rss_mib versions"
).split()
PARTS = {"total", "rollout", "ref_logprobs", "update", "score_other", "own_cpu"}


def timed(totals, others, tokens=4096):
  """Makes steps of the workload `fixed`; the rollout takes half of the time."""
  row = {"completion_length_mean": tokens / 32, "completion_length_max": 128}
  row |= {"reward_mean": 1.5}
  shares = {"total": 1, "own_cpu": 1, "rollout": 1 / 2, "ref_logprobs": 1 / 8}
  shares |= {"update": 1 / 4, "score_other": 1 / 8}
  steps = []
  for i, (total, share) in enumerate(zip(totals, others, strict=True)):
    seconds = {part: x * float(total) for part, x in shares.items()}
    seconds["others"] = float(share)
    compiled = {9: [2.0], 99: [3.0]}.get(total, [])
    steps.append(clock.Step(i, row, seconds, compiled))
  return steps


def report(steps, **settings):
  config = workloads.config_of("fixed")
  config.update_from_flattened_dict(settings)
  return side_by_side.report("fixed", from_config(config), steps, 1)


def test_busy_and_compiling_steps_do_not_count():
  line = report(timed([9, 2, 4, 8, 3], [0.5, 0.01, 0.0, 0.3, 0.02]))
  assert {*KEYS} <= {*line} and PARTS == {*line["seconds"]}
  assert (line["steps"], line["quiet"]) == (4, 3)
  assert line["seconds"]["total"] == {"median": 3, "min": 2, "max": 4}
  assert line["seconds"]["rollout"] == {"median": 1.5, "min": 1, "max": 2}
  assert line["gen_tokens_per_s"]["max"] == 4096
  assert line["step_tokens_per_s"]["min"] == 1024
  assert list(line["per_step"]) == [1, 2, 3, 4]
  assert line["per_step"][3]["others"] == 0.3
  assert line["first_step_s"] == 9 and line["warmup_s"] == [9]
  assert line["compile_s"] == 2 and line["compilations_warmup"] == 1
  line = report(timed([9, 2, 8], [0.5, 0.5, 0.5]))  # all, if none was quiet
  assert line["quiet"] == 0 and line["seconds"]["total"]["median"] == 5
  line = report(timed([9, 2, 99, 4], [0, 0, 0, 0]))  # two of them compile
  assert line["steps"] == 2 and line["seconds"]["total"]["max"] == 4
  assert list(line["per_step"]) == [1, 3]
  assert line["compilations_later"] == 1


def test_report_has_variant_and_planned_lengths():
  steps = timed([1, 1], [0, 0])
  line = report(steps)
  assert (line["variant"], line["lengths_as_planned"]) == ("default", True)
  assert report(timed([1, 1], [0, 0], 4095))["lengths_as_planned"] is False
  changes = {"optim.micro_batches": 2, "model.remat": "none"}
  variant = report(steps, **changes)["variant"]
  assert variant == "model.remat=none optim.micro_batches=2"


def test_clock_measures_each_step(capsys, monkeypatch):
  # Seconds of the machine.
  now = 100.0
  busy = 50.0
  own = 7.0
  monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
  monkeypatch.setattr(clock, "cpu_seconds", lambda: (busy, own))
  monkeypatch.setattr(clock.os, "cpu_count", lambda: 4)

  def rows():
    nonlocal now, busy, own
    for wall, of_all, of_this in ((2.0, 5.0, 3.0), (0.5, 0.25, 0.5)):
      now = now + wall
      busy = busy + of_all
      own = own + of_this
      yield {"seconds": wall / 2}

  a, b = clock.timed(rows(), 2, {"half": "seconds"})
  assert (a.number, b.number) == (0, 1)
  assert a.seconds == dict(total=2.0, own_cpu=3.0, others=0.25, half=1.0)
  assert b.seconds == dict(total=0.5, own_cpu=0.5, others=0.0, half=0.25)
  printed = capsys.readouterr()
  assert printed.out == ""
  assert printed.err == "step 1/2  2.00 s\nstep 2/2  0.50 s\n"
