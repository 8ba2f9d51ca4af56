"""The outside world: configs, devices, tokenizers, checkpoints, metrics."""
