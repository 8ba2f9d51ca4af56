"""The embedded models: small, readable by others, and ready to train."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import train
from grpojax.models import huggingface as hf
from grpojax.runtime.text import tokenizer as tokenizer_lib

NAMES = sorted(path.name for path in hf.ASSETS.iterdir() if path.is_dir())
PROMPTS = dict.fromkeys(NAMES, "Q: 23*4+17\nA: ")
PROMPTS |= {"arithmetic-base": "23*4+17\n"}
ANSWER = "23*4=92\n92+17=109\n#### 109"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_says_how_it_was_made(name):
  files = [path for path in hf.resolve(name).rglob("*") if path.is_file()]
  assert sum(path.stat().st_size for path in files) < 4_000_000
  record = json.loads((hf.resolve(name) / "sft.json").read_text())
  assert "python -m grpojax.sft" in record["command"] and record["losses"]
  parameters = sum(x.size for x in jax.tree.leaves(hf.load_params(name)))
  assert 500_000 < parameters < 2_000_000


@pytest.mark.parametrize("name", NAMES)
def test_its_tokenizer_gives_texts_back(name):
  tokenizer = tokenizer_lib.load(hf.resolve(name))
  text = PROMPTS[name] + ANSWER
  ids = tokenizer.encode(text, add_special_tokens=False)
  assert len(ids) == len(text) and tokenizer.decode(ids) == text
  prompt, _ = tokenizer_lib.encode_prompt(tokenizer, "23*4+17", "{prompt}\n")
  assert prompt == PROMPTS[name]
  eos_ids = tokenizer_lib.eos_ids(hf.resolve(name), tokenizer)
  assert tokenizer.eos_token_id in eos_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_logits_are_those_of_transformers(name):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  tokenizer = tokenizer_lib.load(hf.resolve(name))
  ids = np.array(tokenizer.encode(PROMPTS[name] + ANSWER))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    hf.resolve(name), dtype=torch.float32
  )
  with torch.no_grad():
    expected = model(torch.tensor(ids[None])).logits[0].numpy()
  lm, params = hf.load(name)
  count = len(PROMPTS[name])
  prompt = jnp.asarray(ids[None, :count], jnp.int32)
  completion = jnp.asarray(ids[None, None, count:], jnp.int32)
  prefix = lm.prefill(params, prompt, jnp.ones(prompt.shape, bool))
  hidden = lm.extend(params, prefix, completion).hidden
  hidden = jnp.concatenate([prefix.last_hidden, hidden[0, 0]])
  found = np.asarray(lm.unembed(params, hidden))
  np.testing.assert_allclose(found, expected[count - 1 :], atol=1e-4)


@pytest.mark.slow  # .ci/run's main job starts from one of them
@pytest.mark.parametrize("name", NAMES)
def test_training_starts_from_it(name, tmp_path):
  settings = (
    f"model.path={name} steps=1 batch_size=2 group_size=2 diagnostics.every=0 "
    "optim.micro_batches=1 sampling.max_new_tokens=4 logits_chunk=64 "
    "eval.num_prompts=2 eval.batch_size=2 log.trackers="
  )
  words = [f"--config.{word}" for word in settings.split()]
  run = tmp_path / "run"
  train.main([*words, f"--run_dir={run}"])
  assert (run / "summary.json").exists()
  # What comes out can be started from again.
  tokenizer = tokenizer_lib.load(run / "model")
  prompt, _ = tokenizer_lib.encode_prompt(tokenizer, "23*4+17", "{prompt}\n")
  assert prompt == PROMPTS[name]
  assert jax.tree.structure(
    hf.load_params(run / "model")
  ) == jax.tree.structure(hf.load_params(name))
