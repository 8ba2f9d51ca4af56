"""GRPO as pure functions of arrays."""
