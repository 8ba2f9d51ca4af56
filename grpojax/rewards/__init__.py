"""Reward functions of a prompt, a completion and its example."""
