"""Datasets: problems as plain dicts, and the way from them to prompts."""
