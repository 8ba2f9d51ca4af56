"""Traces of some steps."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from grpojax.training import profiling
from grpojax.training.config import validate


@pytest.mark.parametrize(
  "text, steps", [("", []), ("3:3", [3]), ("10:12", [10, 11, 12])]
)
def test_both_ends_are_steps(text, steps):
  assert list(profiling.parse(text)) == steps


@pytest.mark.parametrize(
  "text, hint",
  [
    ("10", "give FIRST:LAST"),
    ("0:3", "give FIRST:LAST"),
    ("5:4", "give FIRST:LAST"),
    ("-1:4", "give FIRST:LAST"),
    ("a:b", "give FIRST:LAST"),
    ("39:41", "the last step is 40"),
  ],
)
def test_others_are_refused(text, hint, config_with):
  with pytest.raises(ValueError, match=f"profile.steps = '{text}': .*{hint}"):
    validate(config_with(profile__steps=text))
  validate(config_with(profile__steps="39:40"))


def steps_in(folder):
  """The steps that a trace says it has."""
  (file,) = folder.rglob("*.xplane.pb")
  data = jax.profiler.ProfileData.from_file(str(file))
  return sorted(
    dict(event.stats)["step_num"]
    for plane in data.planes
    for line in plane.lines
    for event in line.events
    if event.name == "train"
  )


@pytest.mark.parametrize("last, traced", [(5, [2, 3]), (2, [2])])
def test_the_trace_has_the_steps(last, traced, tmp_path, capsys):
  class Ended(Exception):
    pass

  with contextlib.suppress(Ended):
    with profiling.opened("2:3", tmp_path) as around:
      for step in range(1, last + 1):
        with around(step):
          jnp.ones(8).sum().block_until_ready()
      raise Ended  # also where a run ends by an error
  folder = tmp_path / profiling.PROFILE
  assert steps_in(folder) == traced
  assert (folder / profiling.MEMORY).read_bytes()[:2] == b"\x1f\x8b"  # gzip
  assert f"xprof {folder}" in capsys.readouterr().out


def test_nothing_is_traced_unless_asked(tmp_path):
  with profiling.opened("", tmp_path) as around:
    with around(1):
      pass
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_is_traced(toy, toy_task, toy_model, tmp_path):
  from grpojax import train

  words = toy.arguments(toy_model, steps=3, profile__steps="2:3")
  train.main([*words, f"--run_dir={tmp_path}"])
  assert steps_in(tmp_path / profiling.PROFILE) == [2, 3]
