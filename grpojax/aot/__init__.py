"""Ahead of time: what a compiled program costs, read from its HLO."""
