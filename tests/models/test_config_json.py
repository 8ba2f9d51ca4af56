"""Every key of a config.json is read, fixed, harmless or refused.

test_families.py compares the values with transformers.
"""

import copy
import json
import math

import jax
import pytest
from small_models import config_with

from grpojax.models import huggingface as hf
from grpojax.models.config import check, parameter_shapes
from grpojax.models.rope import Rope

BASE = dict(vocab_size=61, hidden_size=24, num_hidden_layers=8)
BASE |= dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=20)
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 32.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}
YARN = {
  "type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 32768,
}
YARN_5 = dict(YARN, type=None, rope_type="yarn")
HYBRID = dict(layer_types=["attention"] * 8, num_local_experts=0)
HYBRID |= dict(mamba_n_heads=4, num_experts_per_tok=0)
LONGROPE = {
  "type": "longrope",
  "short_factor": [1.0, 1.5, 3.0],
  "long_factor": [2.0, 3.0, 4.0],
}
# As in older configurations on the hub.
OLD = {
  "qwen2": dict(max_window_layers=3, rope_theta=1e6)
  | dict(sliding_window=32, use_sliding_window=True),
  "qwen3": dict(rope_theta=1e6, use_sliding_window=False, head_dim=16),
  "llama": dict(rope_theta=5e5, rope_scaling=LLAMA3),
  "mistral": dict(rope_theta=1e5, sliding_window=7),
  "gemma2": dict(hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=144),
  "gemma3_text": dict(rope_theta=5e5, rope_local_base_freq=2e4)
  | dict(rope_scaling={"rope_type": "linear", "factor": 8.0})
  | dict(sliding_window=512, sliding_window_pattern=3),
  "qwen3_moe": dict(decoder_sparse_step=1, mlp_only_layers=[])
  | dict(max_window_layers=48, num_experts=5, num_experts_per_tok=2)
  | dict(output_router_logits=False),
  "gemma": dict(hidden_act="gelu", rope_theta=2e4),
  "smollm3": dict(rope_theta=5e6, no_rope_layers=[1, 1, 0, 1] * 2)
  | dict(use_sliding_window=False, max_window_layers=28),
  "olmo2": dict(rope_theta=5e5),
  "olmo3": dict(rope_theta=5e5, sliding_window=7, rope_scaling=YARN_5),
  "granite": dict(rope_theta=1e7, logits_scaling=8.0, attention_bias=True),
  "granitemoehybrid": dict(position_embedding_type="rope", rope_theta=1e7)
  | dict(shared_intermediate_size=12, logits_scaling=6),
  "ministral": dict(sliding_window=7),
  "ministral3": dict(sliding_window=None),
  "phi3": dict(rope_scaling=LONGROPE, original_max_position_embeddings=1024)
  | dict(max_position_embeddings=4096, sliding_window=262144),
  "mixtral": dict(rope_theta=2e6, num_local_experts=5, head_dim=16),
  "qwen3_5_text": dict(head_dim=16, full_attention_interval=2)
  | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e7}),
}


def base_of(kind):
  required = HYBRID if kind == "granitemoehybrid" else {}
  return {"model_type": kind} | BASE | required


def read(kind, **changes):
  return hf.to_transformer_config(base_of(kind) | changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OLD)
@pytest.mark.parametrize("complete", [True, False])
def test_new_style_configs_read_like_old_ones(kind, complete):
  transformers = pytest.importorskip("transformers")
  old = base_of(kind) | (OLD[kind] if complete else {})
  if not complete:
    del old["num_key_value_heads"]
    old |= dict(hidden_size=64, num_attention_heads=32)  # for all defaults
  theirs = transformers.AutoConfig.for_model(**copy.deepcopy(old)).to_dict()
  new = {k: v for k, v in theirs.items() if not k.startswith("_name")}
  assert hf.to_transformer_config(new) == hf.to_transformer_config(old)


def test_qwen3_5_has_the_parameters_of_its_model_card():
  text = dict(model_type="qwen3_5_text", vocab_size=248320, hidden_size=1024)
  text |= dict(intermediate_size=3584, num_hidden_layers=24, head_dim=256)
  text |= dict(num_attention_heads=8, num_key_value_heads=2)
  text |= dict(linear_num_value_heads=16, full_attention_interval=4)
  text |= dict(attn_output_gate=True, mamba_ssm_dtype="float32")
  rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
  rope |= dict(mrope_interleaved=True, mrope_section=[11, 11, 10])
  text |= dict(rope_parameters=rope, tie_word_embeddings=True)
  config = hf.to_transformer_config(
    {"model_type": "qwen3_5"} | dict(text_config=text)
  )
  shapes = jax.tree.leaves(
    parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  # As transformers counts those of Qwen3.5-0.8B without its vision model.
  assert sum(map(math.prod, shapes)) == 752_393_024
  assert config.rope == Rope(theta=1e7, share=0.25)
  assert config.period == (True, True, True, False)
  # As in transformers, the share holds for old keys, too.
  text |= {"rope_scaling": YARN | {"mrope_section": [11, 11, 10]}}
  del text["rope_parameters"]
  config = hf.to_transformer_config(text)
  assert (config.rope.share, config.rope.factor) == (0.25, YARN["factor"])


REFUSED = [
  ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
  (
    "phi3",
    {"auto_map": {"AutoModel": "x.Y"}},
    "auto_map: the model has its own",
  ),
  ("gpt_oss", {}, "model_type='gpt_oss'"),
  ("llama", {"quantization": {"bits": 4}}, "has quantization: quantized"),
  ("llama", {"note": 1, "mark": 2}, "note=1, mark=2, .*ignore_keys=note,mark"),
  ("llama", {"note": 1, "rope_ratio": 2}, "in a copy of the directory"),
  ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
  # It would also be the activation after the convolution.
  ("qwen3_5_text", {"hidden_act": "gelu_pytorch_tanh"}, "only 'silu' is"),
  ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
  ("llama", {"architectures": ["LlamaForTokenClassification"]}, "LlamaForTok"),
  ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
  ("llama", {"rope_scaling": {"type": "linear"}}, "lack factor"),
  ("llama", {"rope_parameters": {"mrope_section": [1]}}, "mrope_section"),
  ("mistral", {"layer_types": ["full_attention"] * 8}, "layer_types"),
  ("qwen2", {"layer_types": ["sliding_attention"] * 8}, "window is None"),
  ("qwen3", {"layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
  ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
  ("gemma3_text", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta"),
  ("llama", {"num_attention_heads": 5}, "hidden_size=24 is not a"),
  ("llama", {"vocab_size": 2**31}, "vocab_size=2147483648"),
  ("qwen3_moe", {"num_experts": 2**30}, "with 1073741824 experts"),
  ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
  ("qwen3", {"rope_theta": float("inf")}, "rope_theta=inf"),
  ("llama", {"rope_scaling": 3}, "rope_scaling=3: use an object"),
  ("llama", {"rms_norm_eps": None}, "rms_norm_eps=None"),
  ("llama", {"rope_theta": 1e300}, "rope_theta=1e.300"),
  ("qwen2", {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1"),
  ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "only 1 is"),
  ("olmo3", {"sliding_window": -1}, "window is -1"),
  ("ministral3", {"sliding_window": "x"}, "window is 'x'"),
  ("gemma3_text", {"final_logit_softcapping": 0}, "softcapping=0"),
  ("olmo3", {"layer_types": ["full_attention"] * 3}, "3 layer_types for 8"),
  ("qwen3", {"layer_types": "full_attention"}, "use a list"),
  ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok=None"),
  (
    "phi3",
    {"original_max_position_embeddings": 1} | {"rope_scaling": LONGROPE},
    "of at least 2",
  ),
  ("phi3", {"partial_rotary_factor": 1.5}, "share=1.5"),
  ("mistral3", {"text_config": 3}, "text_config=3"),
  ("llama", {"rope_scaling": LLAMA3 | {"factor": 0}}, "factor=0"),
  ("llama", {"tie_word_embeddings": "no"}, "use true or false"),
  ("llama", {"hidden_act": ["silu"]}, "hidden_act="),
  ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar=-4"),
  ("qwen2", {"rope_scaling": {"type": "yarn"}}, "lacks? .*factor"),
  ("qwen2", {"rope_scaling": YARN | {"beta": 2.0}}, "beta in the rope param"),
  ("qwen2", {"rope_scaling": YARN | {"truncate": 3}}, "truncate=3"),
  ("qwen2", {"rope_scaling": YARN | {"factor": -1}}, "factor=-1"),
  (
    "qwen2",
    {"rope_scaling": {"type": "longrope", "factor": 2.0}},
    "'longrope'",
  ),
  ("smollm3", {"no_rope_layers": [1] * 7}, "no_rope_layers"),
  ("smollm3", {"no_rope_layers": ["1"] * 8}, "use 0 or 1 for each of 8"),
  (
    "smollm3",
    dict(use_sliding_window=True, sliding_window=4)
    | dict(layer_types=["sliding_attention"] * 8),
    "with and without RoPE",
  ),
  ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
  ("granitemoehybrid", {"num_local_experts": None}, "lacks num_local_experts"),
  (
    "granitemoehybrid",
    {"num_local_experts": 62},
    "num_local_experts=62; only 0",
  ),
  ("granitemoehybrid", {"layer_types": None}, "mamba in layer_types"),
  (
    "granitemoehybrid",
    {"layer_types": ["linear_attention"] * 8},
    "linear_attention in layer_types",
  ),
  ("granite", {"residual_multiplier": 0}, "residual_multiplier=0"),
  (
    "ministral",
    {"layer_types": ["chunked_attention"] * 8},
    "chunked_attention",
  ),
  ("ministral3", {"kv_lora_rank": 8}, "kv_lora_rank=8"),
  ("ministral3", {"vision_config": {}}, "vision_config={}"),
  (
    "mistral3",
    {"text_config": {"model_type": "qwen2"}},
    "'qwen2' in text_conf",
  ),
  (
    "phi3",
    {"rope_scaling": LONGROPE | {"type": "linear"}},
    "has linear in rope",
  ),
  ("phi3", {"rope_scaling": LONGROPE | {"short_mscale": 2}}, "short_mscale in"),
  ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
  ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED)
def test_unknown_keys_and_values_are_refused_by_name(kind, change, message):
  with pytest.raises(ValueError, match=message):
    read(kind, **change)


@pytest.mark.parametrize(
  "key",
  "transformers.js_config device_map unsloth_fixed unsloth_version model_name "
  "neftune_noise_alpha unk_token_id max_new_tokens _flash_attn_2_enabled "
  "layer_types quantization_config".split(),
)
@pytest.mark.parametrize("kind", OLD)
def test_harmless_keys_and_null_change_nothing(kind, key):
  if (kind, key) == ("granitemoehybrid", "layer_types"):
    return  # required
  value = None if key in ("layer_types", "quantization_config") else "x"
  assert read(kind, **{key: value}) == read(kind)


@pytest.mark.parametrize(
  "key",
  "hidden_size num_experts rms_norm_eps rope_theta rope_ratio use_mrope "
  "tie_word_embeddings is_llama_config quantization_config auto_map".split(),
)
def test_keys_that_change_a_model_cannot_be_ignored(key, tmp_path):
  file = tmp_path / "llama.json"
  file.write_text(json.dumps(BASE | {"model_type": "llama", key: 1}))
  with pytest.raises(ValueError, match=f"{key}=.*remove {key} from"):
    hf.read_config(file, ("note", key))


def test_ignore_keys_removes_unknown_keys(tmp_path):
  hf_config = {"model_type": "qwen2", "note": 1, "mark": None, "dtype": "x"}
  file = tmp_path / "llama.json"
  file.write_text(json.dumps(hf_config | BASE))
  ignored = hf.read_config(file, ("note", "mark", "dtype", "absent"))
  assert ignored == {k: x for k, x in (hf_config | BASE).items() if k != "note"}


@pytest.mark.parametrize(
  "change, message",
  [
    ({"kv_heads": 3}, "heads=2 is no multiple of kv_heads=3"),
    ({"head_dim": 5}, "head_dim=5 must be even"),
    ({"local_layers": (True,)}, "1 entries for 2 layers"),
    ({"local_layers": (True,) * 2}, "window=0"),
    ({"rope": Rope(share=0.75)}, "RoPE rotates 3 of 4 channels"),
    ({"local_rope": Rope(share=0.5)}, "need the same share and query_beta"),
    ({"rope": Rope(divisors=(1.0,))}, "with 1 divisors"),
    ({"experts": 2, "experts_per_token": 3}, "must be in 1..2"),
  ],
)
def test_inconsistent_configurations_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    check(config_with(**change))


@pytest.mark.parametrize(
  "text, message",
  [
    (None, "no model at .*nowhere"),
    ("[" * 10**5, "config.json is not JSON"),
    ('{"a": %s}' % ("1" * 5000), "config.json is not JSON"),
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
def test_written_config_is_read_by_transformers(tmp_path):
  shape = dict(vocab_size=7, width=12, layers=3, heads=2, kv_heads=1, mlp=20)
  hf.write_config(tmp_path, **shape, pad_id=0, eos_id=1)
  read = hf.to_transformer_config(hf.read_config(tmp_path))
  assert shape == {name: getattr(read, name) for name in shape}
  transformers = pytest.importorskip("transformers")
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert config.model_type == "llama" and config.head_dim == 6
  assert config.pad_token_id == 0 and config.eos_token_id == 1
  assert config.tie_word_embeddings
