"""Libraries that talk while they are imported, imported without a word."""

import os
import types
from unittest import mock

_ADVICE = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def transformers() -> types.ModuleType:
  """The transformers library, which is slow to import: call it when needed.

  Where there is no PyTorch it says on standard error that models will not be
  available. Its tokenizers are, and nothing else of it is used here. Its other
  warnings stay: the setting lasts no longer than the import.
  """
  with mock.patch.dict(os.environ, _ADVICE):
    import transformers

  return transformers
