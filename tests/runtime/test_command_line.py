"""Command lines and config files: overrides, flags, errors."""

import os
import sys

import pytest
from ml_collections import ConfigDict

from grpojax.runtime.cli import command_line, config_file
from grpojax.runtime.cli.configs import flatten
from grpojax.runtime.cli.settings import setting
from grpojax.training.config import SETTINGS, default_config

FLAGS = {
  "run_dir": setting("", "where to write"),
  "dry_run": setting(False, "only check"),
  "steps": setting(2, "that are timed", within="[1, inf)"),
  "kind": setting("", "which", choices=("first", "second")),
}


def _parse(*argv, flags=FLAGS, default=None):
  return command_line.parse(argv, flags, SETTINGS, default=default)


def config_file_with(path, *lines, signature="get_config()"):
  """Writes a config file that applies `lines` to the default config."""
  path.parent.mkdir(exist_ok=True)
  path.write_text(
    "from ml_collections import ConfigDict, FrozenConfigDict, config_dict\n"
    "from grpojax.training.config import default_config\n"
    f"def {signature}:\n  config = default_config()\n"
    + "".join(f"  {line}\n" for line in lines)
    + "  return config\n"
  )
  return path


FUNCTIONS = "--config.reward.functions"
WEIGHTS = "--config.reward.weights"


@pytest.mark.parametrize(
  "words, changes",
  [
    ("--config.optim.learning_rate=1", {"optim.learning_rate": 1.0}),
    ("--config.reward.on_device", {"reward.on_device": True}),
    ("--noconfig.optim.packing", {"optim.packing": False}),
    ("--config.group_size=auto", {"group_size": "auto"}),
    (f"{FUNCTIONS}=format, length", {"reward.functions": ("format", "length")}),
    (f"{WEIGHTS}=2", {"reward.weights": (2,)}),
    (f"{WEIGHTS}=1,0.5", {"reward.weights": (1, 0.5)}),
    # New keys of sections that take any key.
    ("--data.options.difficulty=1,3", {"data.options.difficulty": (1, 3)}),
    ("--config.reward.options.f.x=true", {"reward.options.f.x": True}),
    # The last value wins, unlike config_flags, which joins repeated tuples.
    ("--config.group_size=auto|--group_size=16", {"group_size": 16}),
    (f"{WEIGHTS}=1,2|{WEIGHTS}=(3, 4)", {"reward.weights": (3, 4)}),
    # Without the prefix.
    ("--seed|3", {"seed": 3}),
    ("--data.template=--seed=4 {x}", {"data.template": "--seed=4 {x}"}),
    ("--run_dir=/x=y", {"--run_dir": "/x=y"}),
    ("--dry_run=true|--steps=7", {"--dry_run": True, "--steps": 7}),
  ],
)
def test_values_take_the_type_of_the_default(words, changes):
  config, flags = _parse(*filter(None, words.split("|")))
  assert config.is_locked and config.reward.options.is_locked
  values = flatten(config) | {f"--{k}": x for k, x in flags.items()}
  expected = {f"--{k}": flag.default for k, flag in FLAGS.items()}
  expected |= flatten(default_config()) | changes
  assert values == expected
  assert all(type(values[name]) is type(expected[name]) for name in values)


def test_odd_keys_and_values():
  options = {"from": 1, "top-k": 2, "fast": False}
  odd = ConfigDict({"options": options, "seeds": [1], "note": None})
  words = "--options.from=3 --options.top-k=4 --options.fast --seeds=[2,3]"
  words += " --config.note 4"
  config, _ = _parse(*words.split(), default=lambda: odd)
  assert config.options.to_dict() == {"from": 3, "top-k": 4, "fast": True}
  assert config.seeds == [2, 3] and config.note == 4
  with pytest.raises(ValueError, match="expected a value of type list"):
    _parse("--config.seeds=two", default=lambda: odd)
  config = default_config()
  config.data.options.items = 3  # the name of a method of ConfigDict
  parsed, _ = _parse("--config.data.options.items=4", default=lambda: config)
  assert parsed.data.options["items"] == 4


def test_values_are_not_evaluated(tmp_path):
  call = f"__import__('pathlib').Path({str(tmp_path / 'made')!r}).touch()"
  config, _ = _parse(f"--data.options.size={call}", f"--config.name={call}")
  assert config.data.options.size == config.name == call
  for name in ("steps", "group_size", "reward.weights", "optim.b1"):
    with pytest.raises(ValueError, match="expected a value of type"):
      _parse(f"--config.{name}={call}")
  assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
  "word, text",
  [
    ("--config.lerning_rate=1", "did you mean --config.optim.learning_rate?"),
    ("--lr=1", "did you mean --config.optim.learning_rate?"),
    ("--config.warmup=1", "did you mean --config.optim.warmup_steps?"),
    ("--run_dri=x", "did you mean --run_dir?"),
    ("--xyzzy=1", "--help lists all flags"),
    ("--config.optim=1", "--config.optim is a section"),
    ("--data.options.size={1:1}", "set its fields, --config.data.options.size"),
    ("--config.reward.weights=a", "example --config.reward.weights=1.0 "),
    ("--config.steps=1e3", "type int, for example --config.steps=40 (training"),
    ("--dry_run=perhaps", "expected a value of type bool"),
    ("--config.sampling.stop=,", "expected a value of type tuple"),
    ("--config.data.options.size", "needs a value"),
    ("configs/x.py", "'configs/x.py': did you mean --config=configs/x.py?"),
    ("--run_dir -- --config=configs/x.py", "unknown flag --;"),
    ("-", "unexpected argument '-'"),
    ("--config", "--config needs a value"),
    ("--nodry_run=1", "--nodry_run=1 does not take an argument"),
    ("--dry_run false", "unexpected argument 'false'"),
    ("--config.optim.schedule.x=1", "unknown flag --config.optim.schedule.x"),
    # absl would read more flags from a file.
    ("--flagfile=flags.txt", "unknown flag --flagfile;"),
    ("--data.options.a=1 --data.options.a.b=2", "a has no fields: it is 1"),
    ("--data.options.a.b=2 --data.options.a=1", "options.a is a section"),
    ("--config.group_size=autos", "group_size=8 or auto (completions p"),
    ("--steps=0", "--steps=0: must be 1 or more (that are timed)"),
    ("--kind=frist", "--kind=frist: did you mean first?"),
  ],
)
def test_invalid_words_are_refused(word, text):
  with pytest.raises(ValueError, match="^[^\n]*$") as error:
    _parse(*word.split())
  assert text in str(error.value)


def test_config_file(tmp_path):
  path = config_file_with(tmp_path / "mine.py", "config.steps = 5")
  config, _ = _parse("--config.seed", "3", f"--config={path}")
  assert config.steps == 5 and config.seed == 3
  assert _parse("--config", str(path), "--config.steps=6")[0].steps == 6
  # A path may contain a colon.
  folder = tmp_path / "exp:1.py:x"
  folder.mkdir()
  path = config_file_with(folder / "c.py", "config.steps = 7")
  assert _parse(f"--config={path}")[0].steps == 7
  # A frozen config takes overrides.
  path = config_file_with(folder / "c.py", "config = FrozenConfigDict(config)")
  config, _ = _parse(f"--config={path}", "--config.data.options.size=4")
  assert config.data.options.size == 4
  assert config.is_locked and config.reward.weights == (1.0,)


@pytest.mark.parametrize(
  "line, text",
  [
    ("config.lerning_rate = 1", "line 5: unknown key 'lerning_rate'; did you "),
    ("config = None", "must return a ConfigDict"),
    ("raise ValueError('one\\ntwo')", "line 5: ValueError: one two"),
    ("config = (", "line 5: SyntaxError"),
    ("raise SystemExit", "line 5: SystemExit"),
    ("config.steps = int(input())", "line 5: EOFError"),
    (
      "config = ConfigDict({'a': config_dict.required_placeholder(int)})",
      "a required_placeholder has no value",
    ),
    ("pass\nget_config = 3\ndef other():\n  config = 1", "define get_config()"),
  ],
)
def test_config_file_errors_have_a_line_number(tmp_path, line, text):
  path = config_file_with(tmp_path / "bad.py", line)
  with pytest.raises(ValueError, match="^[^\n]*$") as error:
    _parse(f"--config={path}")
  assert text in str(error.value) and str(path) in str(error.value)


def test_a_config_file_with_an_argument(tmp_path):
  line = "config.name = size"
  signature = "get_config(size)"
  path = config_file_with(tmp_path / "sizes.py", line, signature=signature)
  config, _ = _parse("--config.steps=5", f"--config={path}:a:b")
  assert config.name == "a:b" and config.steps == 5
  assert _parse("--config", f"{path}:")[0].name == ""
  with pytest.raises(ValueError, match="missing 1 .*'size'"):
    _parse(f"--config={path}")
  with pytest.raises(ValueError, match="nosizes.py: no such file .*/sizes.py"):
    _parse(f"--config={tmp_path}/nosizes.py:7b")
  path = config_file_with(tmp_path / "plain.py")
  with pytest.raises(ValueError, match="takes 0 positional arguments but 1"):
    _parse(f"--config={path}:7b")


def test_a_changed_config_file_is_read_again(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "dont_write_bytecode", False)
  for name in ("old", "new"):
    config_file_with(tmp_path / "quick.py", f"config.name = '{name}'")
    os.utime(tmp_path / "quick.py", (0, 0))
    assert _parse(f"--config={tmp_path}/quick.py")[0].name == name


def test_a_word_without_a_name():
  flags = {"model": setting("", "a model"), "out": setting("", "a file")}

  def values(*argv):
    return command_line.parse(argv, flags, positional="model")[1]

  for argv in (("runs/x", "--out=y"), ("--out", "y", "runs/x")):
    assert values(*argv).to_dict() == {"model": "runs/x", "out": "y"}
  for argv in (("a", "b"), ("a", "--model=b"), ("--model", "b", "a")):
    with pytest.raises(ValueError, match="unexpected .*--model is set already"):
      values(*argv)


def test_home_directories_are_expanded(monkeypatch):
  monkeypatch.setenv("HOME", "/h")
  own = default_config()
  own.data.path = "~/data"
  words = "--run_dir=~/run --model.path=~/model --data.options.file=~/x "
  words += f"{FUNCTIONS}=~/mine.py:score,exact_answer --data.template=a~/"
  config, flags = _parse(*words.split(), default=lambda: own)
  assert flags.run_dir == "/h/run"
  assert (config.data.path, config.model.path) == ("/h/data", "/h/model")
  assert config.reward.functions == ("/h/mine.py:score", "exact_answer")
  assert config.data.options.file == "/h/x"
  assert config.data.template == "a~/" and config.is_locked
  with pytest.raises(ValueError, match="^--config=/h/none.py: no such file"):
    _parse("--config=~/none.py")


@pytest.mark.parametrize(
  "error, text",
  [
    (FileNotFoundError(2, "No such file", "/x/y"), "/x/y: No such file"),
    (OSError("odd"), "odd"),
    (MemoryError("Unable to allocate 9 TiB"), "not enough memory: Unable to "),
    (OSError(2, "no \x1b[2J"), r"no \\x1b\[2J"),  # escaped for the terminal
    (RuntimeError("Unable to initialize backend 'tpu'"), "Unable to .* 'tpu'"),
  ],
)
def test_system_errors_are_one_line_messages(error, text):
  with pytest.raises(SystemExit, match=f"^error: {text}"):
    with command_line.usage_errors():
      raise error
  for bug in (KeyError, RuntimeError):
    with pytest.raises(bug), command_line.usage_errors():
      raise bug("a bug")


@pytest.mark.parametrize("form", ["{}", "configs/{}.py", "{}.py"])
def test_packaged_configs(form, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = form.format("gsm8k")
  wrong = form.format("gsm9k")
  assert _parse(f"--config={text}")[0].name == "gsm8k"
  with pytest.raises(ValueError, match=".* did you mean gsm8k[?]") as refused:
    _parse(f"--config={wrong}")
  assert str(refused.value).startswith(f"--config={wrong}: no such file")
  for name in config_file.packaged():
    assert f" {name}" in str(refused.value)
  # The user's files come first.
  if text.endswith(".py"):
    config_file_with(tmp_path / text, "config.name = 'mine'")
    assert _parse(f"--config={text}")[0].name == "mine"
  folder = (tmp_path / wrong).parent
  config_file_with(folder / "gsm9kk.py", "config.name = 'mine'")
  with pytest.raises(ValueError, match=r"did you mean (configs/)?gsm9kk.py\?"):
    _parse(f"--config={wrong}")
  for path in (tmp_path / "sub/gsm8k.py", "../configs/gsm8k.py"):
    with pytest.raises(ValueError, match="no such file"):
      _parse(f"--config={path}")
