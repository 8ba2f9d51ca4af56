"""Settings of a training run: dataclasses, conflicts, sizes of batches."""
