"""GRPO on GSM8K with gemma-3-1b-it.

Command:   python -m grpojax.train --config=configs/gsm8k_gemma3_1b.py
           google/gemma-3-1b-it comes from the Hugging Face Hub (gated: accept
           its terms, and `hf auth login`), or with --config.model.path=DIR from
           a directory. For the data see configs/gsm8k.py.
Hardware:  one GPU of 80 GB, with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
           Or eight chips of TPU v5e in the layout of launch/README.md:
           11.7 of 16 GiB, as compiled for them.
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
  config.name = "gsm8k_gemma3_1b"
  config.model.path = "google/gemma-3-1b-it"
  return config.lock()
