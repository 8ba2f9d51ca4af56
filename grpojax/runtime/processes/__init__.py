"""Several processes, and signals."""
