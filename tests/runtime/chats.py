"""Chat templates in the published formats, and a tokenizer of bytes."""

import functools

import tokenizers as hf
from transformers import PreTrainedTokenizerFast


def chat(messages, prompt, begin=""):
  """Returns a chat template; in `messages`, m is a message, c its content."""
  loop = "{%- for m in messages %}{% set c = m.content %}"
  ask = "{% endfor %}{% if add_generation_prompt %}"
  return f"{begin}{loop}{messages}{ask}{prompt}{{% endif %}}"


START = "<|im_start|>{{ m.role }}\n"
ASK = "<|im_start|>assistant\n"
CHATML = chat(START + "{{ c + '<|im_end|>\n' }}", ASK)
HEAD = "<|start_header_id|>%s<|end_header_id|>{{ '\n\n' }}"
LLAMA = chat(
  HEAD % "{{ m.role }}" + "{{ c | trim }}<|eot_id|>",
  HEAD % "assistant",
  "{{ bos_token }}",
)
GEMMA = chat(
  "{{ raise_exception('roles must alternate') if "
  "(m.role == 'user') != (loop.index0 % 2 == 0) }}<start_of_turn>"
  "{{ 'model' if m.role == 'assistant' else m.role }}\n"
  "{{ c | trim }}{{ '<end_of_turn>\n' }}",
  "<start_of_turn>model\n",
  "{{ bos_token }}",
)
SPECIAL = (
  "<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> "
  "<|eot_id|> <start_of_turn> <end_of_turn> [INST] [/INST] [gMASK] <sop> "
  "<|user|> <|assistant|> <|observation|> <|other|>"
).split()
BYTES = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
ID = {token: i for i, token in enumerate([*SPECIAL, *BYTES, "ab"])}


@functools.cache
def make(template=None, bos=False):
  """Returns a tokenizer of bytes and "ab"; with `bos`, texts start with <s>."""
  backend = hf.Tokenizer(hf.models.BPE(ID, [("a", "b")]))
  backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = hf.decoders.ByteLevel()
  backend.add_special_tokens(SPECIAL)
  if bos:
    backend.post_processor = hf.processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", ID["<s>"])]
    )
  ends = {"bos_token": "<s>", "eos_token": "</s>"}
  made = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
  made.chat_template = template
  return made
