"""Configs, text, processes, files, checkpoints, compilation and terminal."""
