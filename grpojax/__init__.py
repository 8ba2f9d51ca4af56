"""GRPO for JAX: the group is an array axis."""
