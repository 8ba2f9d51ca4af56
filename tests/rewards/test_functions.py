import pathlib
import sys

import pytest

from grpojax.rewards import functions

USER = str(pathlib.Path(__file__).with_name("user_rewards.py"))


def test_a_reward_can_be_in_a_module(tmp_path, monkeypatch):
  (tmp_path / "my_package").mkdir()
  file = tmp_path / "my_package" / "rewards.py"
  file.write_text("def reward(p, c, e, **options):\n  return options['x']\n")
  monkeypatch.syspath_prepend(tmp_path)
  function = functions.resolve("my_package.rewards:reward", {"x": 4})
  assert function("", "", {}) == 4
  del sys.modules["my_package.rewards"], sys.modules["my_package"]


@pytest.mark.parametrize(
  "name, options, message",
  [
    ("math_anser", {}, "package.module:NAME.*did you mean 'math_answer'"),
    ("no.such.package:f", {}, "No module named 'no'"),
    ("no/such/file.py:f", {}, "there is no file /.*such/file.py$"),
    (str(pathlib.Path(USER).parent) + ":f", {}, "No module named"),
    ("../rewards:f", {}, "cannot be loaded: TypeError"),
    (f"{USER}:behav", {}, "has no 'behav'; did you mean 'behave'"),
    (f"{USER}:behave", {"scal": 1}, "no option 'scal'.*; did you mean 'scale'"),
    (f"{USER}:behave", {"prompt": ""}, "no option 'prompt'"),
    ("math_answer", {"x": 1}, "no option 'x': its options are .'thinking'."),
    (
      "math_verify",
      {"thinking": ["<a>"]},
      "pairs of tags as OPENING...CLOSING",
    ),
    ("length", {"target": -1}, "must be 0 or more"),
    ("overlong", {"cache": 0}, "must be positive"),
    ("format", {"tags": ["a", "a"]}, "list at least one tag, each once"),
  ],
)
def test_wrong_names_and_options_are_refused(name, options, message):
  with pytest.raises(ValueError, match=message):
    functions.resolve(name, options)


@pytest.mark.parametrize(
  "code, message",
  [
    ("def reward(:", r"invalid syntax \(mine.py, line 1\)"),
    ("\n1 / 0", r"loaded: ZeroDivisionError: division by zero \(mine.py:2\)"),
    ("import sys\nsys.exit(0)", r"loaded: SystemExit: 0 \(mine.py:2\)"),
    ("class End(BaseException): pass\nraise End", "cannot be loaded: End"),
    ("reward = 3", "is not a function: 3"),
    (None, "Is a directory"),
  ],
)
def test_unloadable_files_are_one_line_errors(code, message, tmp_path):
  file = tmp_path / "mine.py"
  if code is None:
    file.mkdir()
  else:
    file.write_text(code)
  with pytest.raises(ValueError, match=message) as caught:
    functions.resolve(f"{file}:reward")
  assert f"reward '{file}:reward'" in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "names, options, message",
  [
    ([], {}, "at least one"),
    (["length", "other.py:length"], {}, "and other.py:length share a name"),
    (["length"], {"lenght": {}}, "did you mean 'length'"),
    (["length"], {"length": 1}, "reward.options.length = 1: set.*KEYWORD"),
  ],
)
def test_conflicting_names_and_options_are_refused(names, options, message):
  with pytest.raises(ValueError, match=message):
    functions.resolve_all(names, options)
