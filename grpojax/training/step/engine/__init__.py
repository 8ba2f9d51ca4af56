"""Rollouts by vLLM servers (docs/engines.md)."""
