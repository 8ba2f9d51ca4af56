"""Prompts and splits of a run."""
