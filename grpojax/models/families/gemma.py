"""The gemma family (the first): Hugging Face's configuration."""

from typing import Any

from grpojax.models import config_json
from grpojax.models.config import TransformerConfig
from grpojax.models.families import llama

KEYS = llama.KEYS
READ = config_json.READ | {
  "num_key_value_heads": 16,
  "head_dim": 256,
  "hidden_act": "gelu_pytorch_tanh",
  "tie_word_embeddings": True,
  "attention_bias": False,
}
# transformers ignores `hidden_activation` for gemma.
FIXED = {
  "hidden_activation": "gelu_pytorch_tanh",
  "use_bidirectional_attention": False,
}


def config(hf_config: dict[str, Any]) -> TransformerConfig:
  """Reads a complete config.json of model_type "gemma"."""
  activation = hf_config["hidden_act"]
  if activation == "gelu":  # old files mean the approximation by tanh
    activation = "gelu_pytorch_tanh"
  return TransformerConfig(
    **config_json.common(hf_config | {"hidden_activation": activation}),
    rope=config_json.rope(hf_config),
    norm_offset=True,
    embedding_scale=hf_config["hidden_size"] ** 0.5,
  )
