"""Ahead-of-time compilation: costs of a program, read from its HLO."""
