"""The configuration of a new model."""

import jax
import pytest

from grpojax.models import hf
from grpojax.models.transformer import transformer

SHAPE = {"width": 12, "layers": 3, "heads": 2, "kv_heads": 1, "mlp": 20}


def test_the_model_has_the_shape(tmp_path):
  hf.write_config(tmp_path, vocab_size=7, pad_id=0, eos_id=1, **SHAPE)
  lm = transformer(hf.to_transformer_config(hf.read_config(tmp_path)))
  params = jax.eval_shape(lm.init, jax.random.key(0))
  assert params["embed"].shape == (7, 12) and "head" not in params
  assert params["layers"]["q"].shape == (3, 12, 12)
  assert params["layers"]["k"].shape == (3, 12, 6)
  assert params["layers"]["gate"].shape == (3, 12, 20)


def test_it_is_a_config_of_transformers(tmp_path):
  transformers = pytest.importorskip("transformers")
  hf.write_config(tmp_path, vocab_size=7, pad_id=0, eos_id=1, **SHAPE)
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert config.model_type == "llama" and config.head_dim == 6
  assert config.pad_token_id == 0 and config.eos_token_id == 1
  assert config.tie_word_embeddings


def test_heads_that_do_not_fit_are_refused(tmp_path):
  with pytest.raises(ValueError, match="multiple of heads = 5"):
    hf.write_config(
      tmp_path, vocab_size=7, pad_id=0, eos_id=1, **{**SHAPE, "heads": 5}
    )
  assert not list(tmp_path.iterdir())
