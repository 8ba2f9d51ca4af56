"""Profiler traces."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from grpojax.training.report import profiling


def steps_in(folder):
  """Steps in a trace."""
  (file,) = folder.rglob("*.xplane.pb")
  data = jax.profiler.ProfileData.from_file(str(file))
  return sorted(
    dict(event.stats)["step_num"]
    for plane in data.planes
    for line in plane.lines
    for event in line.events
    if event.name == "train"
  )


@pytest.mark.slow
def test_a_failed_run_writes_its_trace(tmp_path, capsys):
  with contextlib.suppress(KeyError):
    with profiling.opened("2:3", tmp_path) as around:
      for step in (1, 2):
        with around(step):
          jnp.ones(8).sum().block_until_ready()
      raise KeyError
  folder = tmp_path / profiling.PROFILE
  assert steps_in(folder) == [2]
  assert (folder / profiling.MEMORY).read_bytes()[:2] == b"\x1f\x8b"  # gzip
  assert f"xprof {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
  "name, last", [("start_trace", 4), ("stop_trace", 4), ("stop_trace", 2)]
)
def test_a_failed_trace_does_not_end_the_run(
  name, last, tmp_path, capsys, monkeypatch
):
  """The run's own error is raised."""
  stop = jax.profiler.stop_trace
  traces = tmp_path / profiling.PROFILE / "plugins" / "profile"
  (traces / "2026_01_01_00_00_00").mkdir(parents=True)  # an earlier trace

  def refuse(*_):
    (traces / "2026_01_01_00_00_01").mkdir()
    raise RuntimeError("No space left on device")

  monkeypatch.setattr(jax.profiler, name, refuse)
  try:
    with pytest.raises(KeyError, match="the reason"):
      with profiling.opened("2:3", tmp_path) as around:
        for step in range(1, last + 1):
          with around(step):
            pass
        raise KeyError("the reason")
  finally:
    if name == "stop_trace":
      stop()
  names = [path.name for path in traces.iterdir()]
  assert "2026_01_01_00_00_00" in names
  assert "2026_01_01_00_00_01" not in names  # partial traces are removed
  text = capsys.readouterr().out
  assert text.count("profile: not written") == text.count("\n") == 1
  assert "No space left on device" in text and "the run goes on" in text


@pytest.mark.slow
def test_profile_steps_are_traced(train_toy, tmp_path):
  train_toy("run", steps=4, profile__steps="2:3")
  assert steps_in(tmp_path / "run" / profiling.PROFILE) == [2, 3]
