"""Disk checks, downloads, GGUF files, records, locks and user code."""
