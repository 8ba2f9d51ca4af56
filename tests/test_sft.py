"""Supervised fine-tuning: texts, errors and the written model."""

import itertools
import json
import pathlib
import re
import shutil

import pytest
from run_helpers import refusal

from grpojax import sft
from grpojax.data import texts as texts_lib
from grpojax.models import huggingface as hf
from grpojax.runtime.cli import settings
from grpojax.runtime.text import tokenization

PROBLEMS = pathlib.Path(__file__).parent / "data" / "gsm8k"


def config_with(**changes):
  config = settings.to_config(sft.SETTINGS)
  config.update(changes)
  return config


def test_the_loss_falls_and_a_model_directory_is_written(toy_model):
  names = "config generation_config tokenizer tokenizer_config sft".split()
  files = {*(f"{name}.json" for name in names), "model.safetensors"}
  assert {path.name for path in toy_model.iterdir()} >= files
  record = json.loads((toy_model / "sft.json").read_text())
  losses = [row["loss"] for row in record["losses"]]
  assert [row["step"] for row in record["losses"]] == [*range(10, 121, 10)]
  # The fixed form of a text leaves about 8 nats for its 12 tokens.
  assert losses[0] > 2 and losses[-1] < 1
  assert record["config"]["model"]["width"] == 16 and record["seconds"] > 0
  assert "--config.model.width=16" in record["command"]
  _, params = hf.load(toy_model)
  assert params["embed"].shape == (100, 16)
  tokenizer = tokenization.load(toy_model)
  assert tokenization.eos_ids(toy_model, tokenizer) == (1, 99)


def test_documents_are_learned_completely():
  tokenizer = tokenization.character_tokenizer()
  texts = sft.texts(config_with(format="document"), tokenizer)
  for context, learned in itertools.islice(texts, 20):
    assert context == [] and learned[-1] == tokenizer.eos_token_id
    assert learned.count(tokenizer.eos_token_id) == 1
    text = tokenizer.decode(learned[:-1])
    assert "####" in text and text.endswith("\n\n")
    # The last token of a problem is an EOS id of the model.
    blank = tokenizer.convert_tokens_to_ids("\n\n")
    assert learned.count(blank) == text.count("####") and learned[-2] == blank


def test_dialogues_are_learned_from_the_answer():
  tokenizer = tokenization.character_tokenizer()
  tokenizer.chat_template = tokenization.CHAT_TEMPLATE
  texts = sft.texts(config_with(format="dialogue"), tokenizer)
  for context, learned in itertools.islice(texts, 20):
    prompt = tokenizer.decode(context)
    answer = tokenizer.decode(learned[:-1])
    assert learned[-1] == tokenizer.eos_token_id and "####" in answer
    assert "Q" not in answer and tokenizer.eos_token_id not in context
    # GRPO encodes the prompt to the same tokens.
    problem = prompt.removeprefix("Q: ").removesuffix("\nA: ")
    assert tokenization.encode_prompt(tokenizer, problem) == (prompt, context)


def test_texts_follow_the_config():
  tokenizer = tokenization.character_tokenizer()

  def decoded(count=30, **changes):
    texts = sft.texts(config_with(format="dialogue", **changes), tokenizer)
    return [
      (tokenizer.decode(a), tokenizer.decode(b[:-1]))
      for a, b in itertools.islice(texts, count)
    ]

  assert decoded() == decoded() != decoded(seed=1)
  assert all("=" in answer for _, answer in decoded(hasty=0.0))
  assert all("=" not in answer for _, answer in decoded(hasty=1.0))
  easy = decoded(difficulty_low=1, difficulty_high=1)
  assert all(p.count("+") + p.count("*") == 1 for p, _ in easy)


@pytest.mark.parametrize(
  "form, eos, text",
  [("document", (1, 99), "1+2\n"), ("dialogue", (1,), "Q: 1+2\nA: ")],
)
def test_the_format_sets_template_and_eos(form, eos, text, toy_model, tmp_path):
  shutil.copytree(toy_model, tmp_path, dirs_exist_ok=True)
  config = config_with(format=form)
  sft.set_format(tmp_path, tokenization.load(tmp_path), config)
  tokenizer = tokenization.load(tmp_path)
  assert tokenization.eos_ids(tmp_path, tokenizer) == eos
  assert tokenization.format_prompt(tokenizer, "1+2", "{prompt}\n") == text


@pytest.mark.slow
def test_a_new_model_of_word_problems(tmp_path, capsys):
  config = config_with(
    format="dialogue", tokenizer="bpe", vocab_size=300, row_length=320
  )
  config.data.name, config.data.path = "gsm8k", str(PROBLEMS)
  config.model.update({"width": 16, "layers": 1, "heads": 2})
  _, params, stream = sft.start(config, tmp_path)
  counts = r"(\d+) texts.*dropped (\d+) texts with more than 320"
  counts = re.search(counts, capsys.readouterr().out)
  used, dropped = map(int, counts.groups())
  assert used + dropped == 32 and used and dropped
  tokenizer = tokenization.load(tmp_path)
  assert params["embed"].shape == (300, 16) == (len(tokenizer), 16)
  eos_ids = tokenization.eos_ids(tmp_path, tokenizer)
  assert eos_ids == (tokenizer.eos_token_id,)
  text = "Q: Ann has 7 €.\nA: "
  prompt, ids = tokenization.encode_prompt(tokenizer, "Ann has 7 €.")
  assert prompt == text == tokenizer.decode(ids)
  for context, learned in itertools.islice(stream, 2 * used):
    assert len(context) + len(learned) <= 320 and learned[-1] in eos_ids
    assert tokenizer.decode(context).startswith("Q: ")


@pytest.mark.parametrize(
  "form, learn_prompts", [("document", True), ("dialogue", False)]
)
def test_examples_are_encoded_in_the_format(form, learn_prompts, capsys):
  config = config_with(format=form, row_length=2000)
  config.data.update(name="gsm8k", path=str(PROBLEMS))
  config.data.learn_prompts = learn_prompts
  examples = sft.load_examples(config)
  tokenizer = tokenization.train_bpe(texts_lib.strings(examples), 300)
  if form == "dialogue":
    tokenizer.chat_template = tokenization.CHAT_TEMPLATE
  stream = sft.texts(config, tokenizer, examples)
  texts = list(itertools.islice(stream, len(examples)))
  assert "dropped 0 texts with more than 2000 tokens" in capsys.readouterr().out
  start = {"document": "{}\n", "dialogue": "Q: {}\nA: "}[form]
  expected = {
    (start.format(e["prompt"]), e["solution"] + "<|endoftext|>")
    for e in examples
  }
  if learn_prompts:
    expected = {("", prompt + solution) for prompt, solution in expected}
  assert {(tokenizer.decode(a), tokenizer.decode(b)) for a, b in texts} == (
    expected
  )


@pytest.mark.parametrize("kind, count", [("text", 1), ("control", 3)])
def test_special_tokens_in_examples_are_text_or_control_tokens(kind, count):
  config = config_with(format="document")
  config.data.update(name="gsm8k", special_tokens=kind)
  tokenizer = tokenization.character_tokenizer()
  examples = [{"prompt": "1<|endoftext|>", "answer": "2<|endoftext|>"}]
  context, learned = next(sft.texts(config, tokenizer, examples))
  assert (context + learned).count(tokenizer.eos_token_id) == count
  text = tokenizer.decode(context + learned)
  assert text == "1<|endoftext|>\n2<|endoftext|><|endoftext|>"


def test_unsuitable_texts_and_models_are_refused(tmp_path):
  problems = [f"--config.data.path={PROBLEMS}", "--config.data.name=gsm8k"]
  problems += [f"--out={tmp_path / 'out'}"]
  chat_model = "--config.model.path=arithmetic-instruct"
  assert "use dialogue" in refusal(sft, *problems, chat_model)
  short = "model.width=16 model.layers=1 model.heads=2 tokenizer=bpe "
  short += "vocab_size=300 row_length=20"
  words = [f"--config.{word}" for word in short.split()]
  assert "all 32 texts have more than 20" in refusal(sft, *problems, *words)
  assert "exists already" in refusal(sft, f"--out={tmp_path}")
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
  "word, text",
  [
    ("--config=arithmetic", "of its settings (advantage, "),
    ("--config.tokenizer=bpe", "not available for arithmetic: use characters"),
    ("--config.forget_low=0.5", "must not be below forget_low = 0.5"),
    ("--config.optim.warmup_steps=2200", "below steps"),
    ("--config.model.path=arithmetic-bose", "no model at"),
    ("--config.difficulty_high=1000000000", "1 to 1000"),
    ("--config.row_length=1000000000", "not enough memory"),
    ("--config.model.width=1000000000", "Change --config.model.width, --c"),
    ("--out=/proc/x", "No such file"),
  ],
)
def test_invalid_settings_are_refused(word, text, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert text in refusal(sft, word)
  assert not list(tmp_path.iterdir())
