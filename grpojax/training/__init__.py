"""Training runs: from a config to a finished run."""
