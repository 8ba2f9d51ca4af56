"""Embedded models: size, tokenizers and logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.models import huggingface as hf
from grpojax.runtime.text import tokenization

NAMES = sorted(path.name for path in hf.ASSETS.iterdir() if path.is_dir())
PROMPTS = dict.fromkeys(NAMES, "Q: 23*4+17\nA: ")
PROMPTS |= {"arithmetic-base": "23*4+17\n"}
ANSWER = "23*4=92\n92+17=109\n#### 109"


@pytest.mark.parametrize("name", NAMES)
def test_size_and_recorded_command(name):
  files = [path for path in hf.resolve(name).rglob("*") if path.is_file()]
  assert sum(path.stat().st_size for path in files) < 4_000_000
  record = json.loads((hf.resolve(name) / "sft.json").read_text())
  assert "python -m grpojax.sft" in record["command"] and record["losses"]
  parameters = sum(x.size for x in jax.tree.leaves(hf.load_params(name)))
  assert 500_000 < parameters < 2_000_000


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_round_trips_text(name):
  tokenizer = tokenization.load(hf.resolve(name))
  text = PROMPTS[name] + ANSWER
  ids = tokenizer.encode(text, add_special_tokens=False)
  assert len(ids) == len(text) and tokenizer.decode(ids) == text
  prompt, _ = tokenization.encode_prompt(tokenizer, "23*4+17", "{prompt}\n")
  assert prompt == PROMPTS[name]
  eos_ids = tokenization.eos_ids(hf.resolve(name), tokenizer)
  assert tokenizer.eos_token_id in eos_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  tokenizer = tokenization.load(hf.resolve(name))
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
  logits = np.asarray(lm.unembed(params, hidden))
  np.testing.assert_allclose(logits, expected[count - 1 :], atol=1e-4)
