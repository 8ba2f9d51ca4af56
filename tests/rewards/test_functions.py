import pathlib
import sys

import pytest

from grpojax.rewards import functions

USER = str(pathlib.Path(__file__).with_name("user_rewards.py"))


def test_a_function_of_a_module(tmp_path, monkeypatch):
  (tmp_path / "my_package").mkdir()
  file = tmp_path / "my_package" / "rewards.py"
  file.write_text("def one(p, c, e, **options):\n  return options['x']\n")
  monkeypatch.syspath_prepend(tmp_path)
  function = functions.resolve("my_package.rewards:one", {"x": 4})
  assert function("", "", {}) == 4
  del sys.modules["my_package.rewards"], sys.modules["my_package"]


@pytest.mark.parametrize(
  "name, options, message",
  [
    ("math_anser", {}, "did you mean 'math_answer'.*package.module:NAME"),
    ("__import__", {}, "unknown reward"),
    ("no.such.package:f", {}, "No module named 'no'"),
    ("no/such/file.py:f", {}, "there is no file /.*such/file.py$"),
    (str(pathlib.Path(USER).parent) + ":f", {}, "No module named"),
    ("../rewards:f", {}, "cannot be loaded: TypeError"),
    (f"{USER}:behav", {}, "has no 'behav'; did you mean 'behave'"),
    (f"{USER}:two_arguments", {}, "cannot be called"),
    (f"{USER}:behave", {"scal": 1}, "no option 'scal'.*; did you mean 'scale'"),
    (f"{USER}:behave", {"prompt": ""}, "no option 'prompt'"),
    ("math_answer", {"x": 1}, "no option 'x': it takes .'thinking'."),
    ("math_verify", {"thinking": ["<a>"]}, "each as OPENING...CLOSING"),
    ("length", {"target": -1}, "must be 0 or more"),
    ("overlong", {"cache": 0}, "must be positive"),
    ("format", {"tags": ["a", "a"]}, "give different names"),
  ],
)
def test_what_cannot_work_is_refused(name, options, message):
  with pytest.raises(ValueError, match=message):
    functions.resolve(name, options)


@pytest.mark.parametrize(
  "code, message",
  [
    ("def reward(:", r"invalid syntax \(mine.py, line 1\)"),
    ("\0", "mine.py': source code string cannot contain null|null bytes"),
    ("\n1 / 0", r"loaded: ZeroDivisionError: division by zero \(mine.py:2\)"),
    ("import sys\nsys.exit(0)", r"loaded: SystemExit: 0 \(mine.py:2\)"),
    ("class End(BaseException): pass\nraise End", "cannot be loaded: End"),
    ("import nowhere", "No module named 'nowhere'"),
    ("reward = 3", "is no function, but 3"),
    (None, "Is a directory"),
  ],
)
def test_a_file_that_cannot_be_loaded_is_a_sentence(code, message, tmp_path):
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
    (["length", "other.py:length"], {}, "length and other.py:length have one"),
    (["length"], {"lenght": {}}, "did you mean 'length'"),
    (["length"], {"length": 1}, "reward.options.length = 1: give.*KEYWORD"),
  ],
)
def test_names_and_options_that_do_not_fit_are_refused(names, options, message):
  with pytest.raises(ValueError, match=message):
    functions.resolve_all(names, options)
