"""Prompts, splits and mixtures of a run."""
