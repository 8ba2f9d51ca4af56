"""GRPO on GSM8K with adapters of SmolLM3-3B, thinking switched off.

Command:   python -m grpojax.train --config=configs/gsm8k_smollm3_3b.py
           HuggingFaceTB/SmolLM3-3B comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  one GPU of 80 GB, or four chips of TPU v5e (launch/README.md).
Time:      unknown; not run yet, for lack of an accelerator.
Expected:  a rising reward, and a higher accuracy on the 1,319 test problems
           than at step 0.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

COMMON = pathlib.Path(__file__).with_name("gsm8k.py")


def get_config() -> ConfigDict:
  config = runpy.run_path(str(COMMON))["get_config"]().unlock()
  config.name = "gsm8k_smollm3_3b"
  config.model.path = "HuggingFaceTB/SmolLM3-3B"
  config.data.template_options = ConfigDict({"enable_thinking": False})
  config.sampling.parts = 4  # keys and values of 1,024 samples take 72 GiB
  config.lora.rank = 32
  config.optim.learning_rate = 1e-5
  return config.lock()
