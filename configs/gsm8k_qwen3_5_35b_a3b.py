"""GRPO on GSM8K with Qwen3.5-35B-A3B, thinking switched off.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen3_5_35b_a3b.py
           Qwen/Qwen3.5-35B-A3B comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  128 chips of TPU v5e (8x16): 15.4 of 16 GiB, as compiled for them
           (launch/README.md).
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
  config.name = "gsm8k_qwen3_5_35b_a3b"
  config.model.path = "Qwen/Qwen3.5-35B-A3B"
  config.data.template_options = ConfigDict({"enable_thinking": False})
  config.mesh.fsdp = 8
  config.mesh.expert = 4
  config.mesh.tensor = 4
  config.mesh.sampling_tensor = 4
  config.optim.micro_batches = 16
  return config.lock()
