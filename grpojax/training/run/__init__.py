"""Training runs from start to end, and their directories."""
