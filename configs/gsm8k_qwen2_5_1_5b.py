"""GRPO on GSM8K with Qwen2.5-1.5B-Instruct.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen2_5_1_5b.py
           Qwen/Qwen2.5-1.5B-Instruct comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  one GPU of 80 GB, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
           XLA's estimate, compiled for the CPU, is 60 GiB at its peak.
           Or eight chips of TPU v5e in the layout of launch/README.md:
           13.0 of 16 GiB, as compiled for them.
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
  config.name = "gsm8k_qwen2_5_1_5b"
  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  return config.lock()
