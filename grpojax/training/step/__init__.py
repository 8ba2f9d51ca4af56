"""Training step, from prompts to the updated state."""
