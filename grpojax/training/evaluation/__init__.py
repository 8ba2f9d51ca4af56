"""Held-out evaluations, and the best state of a run."""
