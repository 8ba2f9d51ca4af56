"""Training step: what the devices and the host do for one update."""
