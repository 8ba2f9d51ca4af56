"""Training settings: dataclasses, conflicts, batch sizes."""
