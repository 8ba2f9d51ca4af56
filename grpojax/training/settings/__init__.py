"""Settings of a training run: dataclasses, conflicts, and the way from a
config."""
