"""Any JSONL file: what it gives, and that its mistakes are found at once."""

import json
import random

import pytest

from grpojax.data import jsonl

ROWS = [
  {"prompt": "6 * 7?", "answer": "42", "level": 1, "tags": ["a", {"b": None}]},
  {"prompt": "Ünïcode \u2028 → 𝟙?", "answer": "ja"},
  {"prompt": [{"role": "user", "content": "Hi"}], "answer": "-1.50"},
]


def write(path, rows, end="\n"):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  path.write_bytes("".join(line + end for line in lines).encode())
  return path


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \t\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_ways_to_write_lines(end, start, cut, tmp_path):
  rows = [json.dumps(r, ensure_ascii=False) for r in ROWS]
  file = write(tmp_path / "data.jsonl", rows, end)
  content = start + file.read_bytes()
  file.write_bytes(content.rstrip() if cut else content)
  assert list(jsonl.load("train", path=str(file))) == ROWS
  assert list(jsonl.load("train", path=file, size=2)) == ROWS[:2]


def test_fields_by_other_names(tmp_path):
  turns = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6 * 7?"},
  ]
  rows = [
    {"question": "1?", "final": 42, "answer": "long"},
    {"chat": turns, "final": 0.5, "question_id": 3},
    {"question": "3?", "final": "", "chat": turns},
  ]
  file = write(tmp_path / "a.jsonl", rows)
  names = {"prompt": "question", "answer": "final", "messages": "chat"}
  assert list(jsonl.load("train", path=file, **names)) == [
    rows[0] | {"prompt": "1?", "answer": 42},
    rows[1] | {"prompt": turns, "answer": 0.5},
    rows[2] | {"prompt": "3?", "answer": ""},
  ]
  write(file, [{"prompt": "x"}])
  assert list(jsonl.load("train", path=file, answer="")) == [{"prompt": "x"}]


GOOD = '{"prompt": "x", "answer": "1"}'


@pytest.mark.parametrize(
  "line, text",
  [
    ("no json", "Expecting value"),
    ('{"prompt": "x"', "delimiter"),
    ('["prompt"]', "object is needed, not list"),
    ("[" * 100_000, "recursion"),
    ('{"prompt": "x", "answer": NaN}', "NaN is no value of JSON"),
    ('{"prompt": "x", "answer": "1", "y": [-Infinity]}', "-Infinity is no"),
    ('{"prompt": "x", "answer": 1e999}', "'answer' is inf: not a number"),
    ('{"prompt": "x", "answer": %s}' % ("1" * 5000), "4300 digits"),
    ('{"prompt": "x", "answer": "1", "answer": "2"}', "key 'answer' .* twice"),
    ('{"prompt": "x", "answer": "1", "y": {"z": 1, "z": 1}}', "the key 'z'"),
    ('{"answer": "1"}', r"no field 'prompt'.*'answer'"),
    ('{"prompt": " ", "answer": "1"}', "not empty"),
    ('{"prompt": "\\ud800", "answer": "1"}', "prompt is no text: its char"),
    ('{"prompt": "x", "answer": "1\\udc00"}', "the answer 'answer' is no text"),
    (
      '{"prompt": [{"role": "user", "content": "\\ud83d "}], "answer": "1"}',
      "prompt: a message's content is no text: its character 0,",
    ),
    ('{"prompt": 3, "answer": "1"}', "text or a list"),
    ('{"prompt": [], "answer": "1"}', "text or a list"),
    ('{"prompt": ["x"], "answer": "1"}', "a message is an object"),
    ('{"prompt": [{"role": "user"}], "answer": "1"}', "message's content"),
    ('{"prompt": [{"content": "x"}], "answer": "1"}', "message's role"),
    (
      '{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}',
      "the model writes that",
    ),
    ('{"prompt": "x"}', "data.options.answer names its field"),
    ('{"prompt": "x", "answer": true}', "not True"),
    ('{"prompt": "x", "answer": ["1"]}', "text or a number"),
    (b'{"prompt": "\xff", "answer": "1"}', "byte 13 of the line.*UTF-8"),
  ],
)
def test_a_bad_line_is_named_when_the_file_is_opened(line, text, tmp_path):
  file = tmp_path / "a.jsonl"
  line = line if isinstance(line, bytes) else line.encode()
  file.write_bytes(b"\n".join([GOOD.encode(), b"", line, GOOD.encode()]))
  with pytest.raises(ValueError, match=f"(?s)a.jsonl, line 3: .*{text}"):
    jsonl.load("train", path=file)
  assert len(jsonl.load("train", path=file, size=1)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  "text, kind",
  [
    (f"[{GOOD}]", "a JSON array"),
    (f"[\n{GOOD}\n]", "a JSON array"),
    ('{\n"prompt": "x"\n}', "JSON over several lines"),
    ("prompt,answer\nx,1", "CSV"),
  ],
)
def test_files_of_other_formats(text, kind, tmp_path):
  file = tmp_path / "a.json"
  file.write_text(text)
  with pytest.raises(ValueError, match=f"{kind}, convert it to JSONL"):
    jsonl.load("train", path=file)
  file.write_bytes(b"PAR1\x15\xff")
  with pytest.raises(ValueError, match="data.name = 'parquet'"):
    jsonl.load("train", path=file)


def test_a_share_is_held_out_by_prompt(tmp_path):
  rng = random.Random(0)
  rows = [{"prompt": f"{i % 400}?", "answer": str(i)} for i in range(1200)]
  rows += [
    {"messages": [{"role": "user", "content": str(i)}], "answer": "1"}
    for i in range(100)
  ]
  file = write(tmp_path / "a.jsonl", rows)

  def split(name, share):
    return list(jsonl.load(name, path=file, test=share))

  train, test = split("train", 0.2), split("test", 0.2)
  keys = [{json.dumps(x["prompt"]) for x in s} for s in (train, test)]
  assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 500
  assert len(train) + len(test) == 1300
  assert 0.14 < len(keys[1]) / 500 < 0.26
  # Blanks, and the order of a message's keys, make no other prompt.
  same = [{"prompt": f"{i}? ", "answer": ""} for i in range(400)]
  turn = [{"content": " 7", "role": "user"}]
  same += [{"messages": turn, "answer": ""}]
  write(tmp_path / "b.jsonl", same)
  again = jsonl.load("test", path=tmp_path / "b.jsonl", test=0.2)
  texts = {f"{x['prompt']}".strip() for x in again}
  assert texts - {f"{turn}"} == {
    x["prompt"] for x in test if "?" in x["prompt"]
  }
  assert (f"{turn}" in texts) == any("content': '7'" in f"{x}" for x in test)
  alike = [{"prompt": f"{i}?", "answer": "1"} for i in range(1000)]
  write(tmp_path / "b.jsonl", alike)
  for share in (0.02, 0.05, 0.1, 0.3):  # three standard deviations
    held_out = jsonl.load("test", path=tmp_path / "b.jsonl", test=share)
    off = abs(len(held_out) / 1000 - share)
    assert off < 3 * (share * (1 - share) / 1000) ** 0.5
  # A property of the prompt: order and neighbours do not matter.
  rng.shuffle(rows)
  write(file, rows[:700])
  chosen = {json.dumps(x["prompt"]) for x in split("test", 0.2)}
  assert chosen <= keys[1]
  assert len(split("test", 1)) == 700
  with pytest.raises(ValueError, match="no example of the split 'train'"):
    split("train", 1.0)


def test_what_cannot_be_opened(tmp_path):
  file = write(tmp_path / "a.jsonl", ROWS)
  for options, text in [
    ({"path": ""}, "needs data.path"),
    ({"path": tmp_path / "b.jsonl"}, "b.jsonl is not a file"),
    ({"path": "/dev/null"}, "/dev/null is not a file"),
    ({"path": tmp_path}, "train.jsonl does not exist"),
    ({"path": tmp_path, "test": 0.1}, "for a single file"),
    ({"path": file, "test": 1.5}, r"a share in 0\.\.1"),
  ]:
    with pytest.raises(ValueError, match=text):
      jsonl.load("train", **options)
  with pytest.raises(
    ValueError, match="one set of files without held-out.*0.05"
  ):
    jsonl.load("test", path=file)
  with pytest.raises(ValueError, match="no example"):
    jsonl.load("train", path=write(tmp_path / "empty.jsonl", [""]))


def test_a_file_that_changes_is_noticed(tmp_path):
  file = write(tmp_path / "a.jsonl", ROWS)
  examples = jsonl.load("train", path=file)
  write(file, [ROWS[0] | {"answer": "43"}, *ROWS[1:], ROWS[0]])
  with pytest.raises(ValueError, match="a.jsonl changed"):
    examples[0]
  assert examples[1] == ROWS[1]  # that line is the same


def test_the_test_split_may_be_a_file_of_its_own(tmp_path):
  for name in ("a", "b"):
    row = json.dumps({"prompt": name, "answer": name})
    (tmp_path / f"{name}.jsonl").write_text(f"{row}\n{row}\n")
  files = {"path": tmp_path / "a.jsonl", "test": str(tmp_path / "[b].jsonl")}
  for split, prompt in (("train", "a"), ("test", "b")):
    assert [x["prompt"] for x in jsonl.load(split, **files)] == [prompt] * 2
  with pytest.raises(ValueError, match="nowhere is not a file"):
    jsonl.load("test", **files | {"test": "nowhere"})
