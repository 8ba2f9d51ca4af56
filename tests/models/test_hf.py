"""Model directories that are refused, and the configuration of a new one."""

import pytest

from grpojax.models import huggingface as hf

SHAPE = dict(width=12, layers=3, heads=2, kv_heads=1, mlp=20)
SHAPE |= dict(vocab_size=7, pad_id=0, eos_id=1)


@pytest.mark.parametrize(
  "text, message",
  [
    (None, "no model at .*nowhere"),
    ("[" * 10**5, "config.json is not JSON"),
    ('{"a": %s}' % ("1" * 5000), "config.json is not JSON"),
    ("{", "config.json is not JSON"),
  ],
)
def test_bad_directories_are_refused_by_name(tmp_path, text, message):
  path = tmp_path / "nowhere"
  if text is not None:
    path.mkdir()
    (path / "config.json").write_text(text)
  with pytest.raises(ValueError, match=message):
    hf.load(path)


@pytest.mark.slow
def test_a_new_model_has_its_shape_also_in_transformers(tmp_path):
  hf.write_config(tmp_path, **SHAPE)
  read = hf.to_transformer_config(hf.read_config(tmp_path))
  shape = {name: getattr(read, name) for name in SHAPE if "_id" not in name}
  assert SHAPE == shape | {"pad_id": 0, "eos_id": 1}
  transformers = pytest.importorskip("transformers")
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert config.model_type == "llama" and config.head_dim == 6
  assert config.pad_token_id == 0 and config.eos_token_id == 1
  assert config.tie_word_embeddings


def test_heads_that_do_not_fit_are_refused(tmp_path):
  with pytest.raises(ValueError, match="multiple of num_attention_heads=5"):
    hf.write_config(tmp_path, **SHAPE | {"heads": 5})
  assert not list(tmp_path.iterdir())
