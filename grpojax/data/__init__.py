"""Data sets of examples (plain dicts), and batches of prompts from them."""
