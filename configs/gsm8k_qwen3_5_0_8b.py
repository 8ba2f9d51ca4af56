"""GRPO on GSM8K with Qwen3.5-0.8B, thinking switched off.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen3_5_0_8b.py
           Qwen/Qwen3.5-0.8B comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  one GPU of 80 GB, or four chips of TPU v5e with
           --config.optim.micro_batches=16 (launch/README.md).
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
  config.name = "gsm8k_qwen3_5_0_8b"
  config.model.path = "Qwen/Qwen3.5-0.8B"
  config.data.template_options = ConfigDict({"enable_thinking": False})
  return config.lock()
