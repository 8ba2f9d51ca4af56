"""Metrics, samples, progress lines and the report of a run."""
